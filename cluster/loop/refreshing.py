"""A reference that takes over the policy's weights periodically.

``reference.refresh_every`` is the period in steps (TRL's ``sync_ref_model``). The model folders are
``reference/STEP-LINEAGE/``, of which the newest two are kept. Each checkpoint has links to the
folder in use.
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
    """The reference of a run.

    ``folder``: the model folder of the last refresh; None: the reference of the configuration.
    """

    def __init__(self, every: int | None, run: Path) -> None:
        self.folder: Path | None = None
        self._every = every
        self._below = run / NAME

    async def refresh(self, policy: PolicyGroup, version: Version) -> None:
        """Take over the weights of ``version``, when its step is due for a refresh.

        Raises PolicyLost.
        """
        if not self._every or version.step % self._every:
            return
        # Without parents: on an unmounted storage they would be made below its mount point.
        self._below.mkdir(exist_ok=True)
        new_folder = self._below / f"{version.step}-{version.lineage}"
        await policy.all(PolicyRank.write_model, str(new_folder), version)
        previous_folder = self.folder
        self.folder = new_folder
        for folder in self._below.iterdir():
            # A call that is under way may still load the previous one.
            if folder not in (new_folder, previous_folder):
                shutil.rmtree(folder, ignore_errors=True)

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
        for folder in (checkpoint.folder / NAME).glob("*"):
            self.folder = self._below / folder.name
            # Another run's folder may have the same name.
            shutil.rmtree(self.folder, ignore_errors=True)
            linked(folder, self.folder)
