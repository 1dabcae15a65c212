"""Memory limits of control groups and Slurm jobs, on trees of files as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloop.launch.limits import MemoryLimit, memory_limit, ray_memory

GIB = 2**30


def write(folder: Path, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n", encoding="utf-8")
    return folder


def found(tmp_path: Path, own: str, **environment: str) -> MemoryLimit | None:
    (tmp_path / "own").write_text(own, encoding="utf-8")
    return memory_limit(environment, tmp_path / "groups", tmp_path / "own")


def test_nothing_is_limited_without_groups_and_slurm(tmp_path: Path) -> None:
    assert found(tmp_path, "") is None
    assert memory_limit({}, tmp_path / "none", tmp_path / "none") is None


def test_the_lowest_limit_above_a_job_counts(tmp_path: Path) -> None:
    """Version 2: Slurm's step has none of its own, its job has one."""
    job = tmp_path / "groups" / "system.slice" / "job_7"
    write(tmp_path / "groups" / "system.slice", memory__max=8 * GIB, memory__current=5 * GIB)
    write(job, memory__max=2 * GIB, memory__current=GIB)
    write(job / "step_0", memory__max="max", memory__current=GIB // 2)
    limit = found(tmp_path, "0::/system.slice/job_7/step_0\n")
    assert limit == MemoryLimit(2 * GIB, GIB, f"the control group {job}")


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    """The path of the host leads nowhere in it."""
    write(tmp_path / "groups", memory__max=3 * GIB, memory__current=GIB)
    limit = found(tmp_path, "0::/../../kubepods/pod1\n")
    assert limit is not None
    assert (limit.most, limit.used) == (3 * GIB, GIB)


def test_version_1(tmp_path: Path) -> None:
    memory = write(tmp_path / "groups" / "memory", memory__limit_in_bytes=2**63 - 4096)
    write(memory / "slurm" / "job_7", memory__limit_in_bytes=GIB, memory__usage_in_bytes=7)
    own = "12:cpu,cpuacct:/\n9:memory:/slurm/job_7\n0::/system.slice\n"
    assert found(tmp_path, own) == MemoryLimit(
        GIB, 7, f"the control group {memory / 'slurm/job_7'}"
    )
    assert found(tmp_path, "9:memory:/\n") is None, "a number that stands for none"


@pytest.mark.parametrize(
    ("environment", "most"),
    [
        ({"SLURM_MEM_PER_NODE": "2048"}, 2 * GIB),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "8"}, 4 * GIB),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "512"}, None),
    ],
)
def test_what_a_slurm_job_asked_for(
    tmp_path: Path, environment: dict[str, str], most: int | None
) -> None:
    limit = found(tmp_path, "", **environment)
    assert (limit and limit.most) == most


def test_ray_is_given_what_it_cannot_see(tmp_path: Path) -> None:
    limit = MemoryLimit(GIB, None, "a job")
    given = ray_memory(None, limit)
    assert given["--object-store-memory"] <= 0.3 * GIB
    assert given["--memory"] + given["--object-store-memory"] == GIB
    assert (
        ray_memory(None, MemoryLimit(GIB // 8, None, "a small one"))["--object-store-memory"]
        == 75 * 2**20
    ), "Ray takes no less"
    assert ray_memory(5, limit) == {"--object-store-memory": 5, "--memory": GIB - 5}
    assert ray_memory(None, None) == {}
    assert ray_memory(5, None) == {"--object-store-memory": 5}
    assert ray_memory(None, MemoryLimit(2**60, None, "more than the machine has")) == {}
