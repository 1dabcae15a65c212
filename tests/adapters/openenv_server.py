"""A server of the published ``openenv`` that counts to three, with a picture.

It has an environment of its own.

Arguments: number of sessions, port.
"""

import base64
import io
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from PIL import Image


class Add(Action):
    by: int


class Count(Observation):
    text: str = ""
    screenshot: str = ""


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.count, self._state = 0, State(episode_id="", step_count=0)

    def _seen(self, reward=None, done=False):
        file = io.BytesIO()
        Image.new("RGB", (56, 28), (self.count * 60, 80, 120)).save(file, "PNG")
        picture = base64.b64encode(file.getvalue()).decode()
        return Count(
            text=f"the count is {self.count}", screenshot=picture, reward=reward, done=done
        )

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return self._seen()

    def step(self, action, **kwargs):
        self.count += action.by
        return self._seen(float(self.count == 3), self.count >= 3)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Counting, Add, Count, max_concurrent_envs=int(sys.argv[1]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
