"""GRPO for vision-language agents on Ray."""

from pathlib import Path

_package = Path(__file__).resolve().parent
_checkout = _package.parent

# In a checkout, actors, cluster, judge, recipes and serve_apps are folders of its root, to which
# this folder has links. Whatever unpacks a link as a text file (a zip, Git for Windows, the package
# of a Ray job) leaves them to be found in the root.
if not (_package / "actors").is_dir() and (_checkout / "actors" / "__init__.py").is_file():
    __path__.append(str(_checkout))
