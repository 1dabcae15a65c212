"""A reference that takes over the policy's weights every so many steps
(``reference.refresh_every``; TRL's ``sync_ref_model``): model folders ``reference/STEP-LINEAGE/``,
of which the newest two are kept, and links to the one in use in each checkpoint.
"""

import shutil
from pathlib import Path

from rayloop.actors.policy import PolicyRank
from rayloop.cluster.supervision.policy_group import PolicyGroup
from rayloop.core.files import linked
from rayloop.core.types import Version
from rayloop.run.checkpoint import Checkpoint

NAME = "reference"


class RefreshedReference:
    """``folder``: the model folder of the last refresh; None: the reference is the one of the
    configuration.
    """

    def __init__(self, every: int | None, run: Path) -> None:
        self.folder: Path | None = None
        self._every, self._below = every, run / NAME

    async def refresh(self, policy: PolicyGroup, version: Version) -> None:
        """Take over the weights of ``version``, when its step is one for that.

        Raises PolicyLost.
        """
        if not self._every or version.step % self._every:
            return
        # Without parents: on an unmounted storage they would be made below its mount point.
        self._below.mkdir(exist_ok=True)
        made = self._below / f"{version.step}-{version.lineage}"
        await policy.all(PolicyRank.write_model, str(made), version)
        before, self.folder = self.folder, made
        for old in self._below.iterdir():
            if old not in (made, before):  # a call that is under way may still load the one before
                shutil.rmtree(old, ignore_errors=True)

    def keep(self, checkpoint: Path) -> None:
        """Put the folder that is in use into a checkpoint. Raises OSError."""
        # The checkpoint needs links: a later refresh
        # removes this folder, and the files must survive.
        if self.folder is not None:
            linked(self.folder, checkpoint / NAME / self.folder.name)

    def restore(self, checkpoint: Checkpoint | None) -> None:
        """Use what ``keep`` put into the checkpoint.

        Raises Damaged when it is not what was written.
        """
        self.folder = None
        if not self._every or checkpoint is None:
            return
        checkpoint.verify(lambda name: name.startswith(f"{NAME}/"))
        for saved in (checkpoint.folder / NAME).glob("*"):
            self.folder = self._below / saved.name
            shutil.rmtree(self.folder, ignore_errors=True)  # another run's may have the same name
            linked(saved, self.folder)
