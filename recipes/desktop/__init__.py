"""Tasks on local desktops: the rows of a data file for ``rayloop.envs.desktop``."""
