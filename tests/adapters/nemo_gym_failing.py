"""A resources server of the published ``nemo-gym`` that does what a row's column ``does`` says: it
masks, breaks or pays. Argument: port.
"""

import json
import os
import sys

from fastapi import HTTPException
from nemo_gym import base_resources_server, global_config
from nemo_gym.judge import JudgeError
from pydantic import ConfigDict

NAME = "failing"


class Request(base_resources_server.BaseVerifyRequest):
    model_config = ConfigDict(extra="allow")
    does: str


class Failing(base_resources_server.SimpleResourcesServer):
    ray_enabled = False

    async def verify(self, body: Request) -> base_resources_server.BaseVerifyResponse:
        kind, _, value = body.does.partition(" ")
        if kind == "judge":
            raise JudgeError("the judge does not answer")
        if kind == "status":
            raise HTTPException(int(value), "as the test wants it")
        if kind == "breaks" or (kind == "broken_by_answers" and body.response.output):
            raise ValueError("as the test wants it")
        marks = {"mask_sample": True, "failure_kind": value} if kind == "mask" else {}
        return base_resources_server.BaseVerifyResponse(
            **body.model_dump(), reward=float(kind == "pays"), failure_reason=body.does, **marks
        )


def main(port: str) -> None:
    settings = {"entrypoint": "app.py", "domain": "other", "host": "127.0.0.1", "port": int(port)}
    config = {NAME: {"resources_servers": {NAME: settings}}, "dry_run": False}
    config["head_server"] = {"host": "127.0.0.1", "port": 1}
    os.environ[global_config.NEMO_GYM_CONFIG_PATH_ENV_VAR_NAME] = NAME
    os.environ[global_config.NEMO_GYM_CONFIG_DICT_ENV_VAR_NAME] = json.dumps(config)
    Failing.run_webserver()


if __name__ == "__main__":
    main(sys.argv[1])
