"""The laboratory leaves nothing behind that keeps the next one from starting."""

import subprocess
from subprocess import PIPE

import pytest

from tests.deploy.slurm.lab import lab, why_not

pytestmark = pytest.mark.slurm


def test_a_lab_starts_while_a_process_of_the_last_one_still_ends() -> None:
    if problem := why_not():
        pytest.skip(problem)
    with lab() as first:
        space = f"{first.mark}-cpu1"
        late = subprocess.Popen(
            ["ip", "netns", "exec", space, "sh", "-c", "echo inside; exec sleep 60"], stdout=PIPE
        )
        assert late.stdout is not None
        assert late.stdout.readline() == b"inside\n"
    try:
        with lab() as second:
            assert second.idle()
    finally:
        late.kill()
        late.wait(5)
