"""A resources server of the published ``nemo-gym``, started by its own ``run_webserver``.

Arguments: name of the server, port.
"""

import os
import sys
from importlib import import_module

from nemo_gym import global_config, server_utils


def main(name: str, port: str) -> None:
    """Serve. Their commands hand the configuration over in these variables, too."""
    settings = f"{{entrypoint: app.py, domain: other, host: 127.0.0.1, port: {port}}}"
    os.environ[global_config.NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME] = name
    os.environ[global_config.NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = (
        f"{name}: {{resources_servers: {{{name}: {settings}}}}}\n"
        "head_server: {host: 127.0.0.1, port: 1}\n"
        "dry_run: false\n"
    )
    app = import_module(f"resources_servers.{name}.app")
    [server] = [
        value
        for value in vars(app).values()
        if isinstance(value, type)
        and issubclass(value, server_utils.SimpleServer)
        and value.__module__ == app.__name__
    ]
    server.run_webserver()


if __name__ == "__main__":
    main(*sys.argv[1:])
