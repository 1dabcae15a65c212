"""What a program in bubblewrap sees of this machine, and as whom it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayloop.sandbox import bubblewrap

pytestmark = pytest.mark.env

LOOK = """
import json, os
def text(path):
    try:
        return open(path).read()
    except OSError as error:
        return str(error.errno)
def wrote(path, size):
    try:
        return open(path, "w").write("0" * size)
    except OSError as error:
        return error.errno
print(json.dumps({
    "uid": os.getuid(), "root": os.listdir("/"), "secret": text(SECRET), "first": text("/proc/1/environ"),
    "passwd": text("/etc/passwd"), "interfaces": text("/proc/net/dev").count(":"), "given": text(GIVEN), "capabilities":
    text("/proc/self/status").split("CapEff:")[1].split()[0], "kept": wrote(KEPT + "/x", 1), "usr": wrote("/usr/x", 1),
    "full": wrote("/tmp/full", 2 << 20), "environment": dict(os.environ),
}))
"""


def test_a_program_sees_the_system_and_what_it_was_given_and_is_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = bubblewrap.free_user() if os.geteuid() == 0 else None
    number = user.number if user else None
    if refused := bubblewrap.refused(number):
        pytest.skip(f"bubblewrap does not work here: {refused}")
    monkeypatch.setenv("A_TOKEN", "secret")
    secret, given, kept = tmp_path / "secret", tmp_path / "given", tmp_path / "kept"
    secret.write_text("secret", encoding="utf-8")
    given.write_text("given", encoding="utf-8")
    given.chmod(0o644)
    kept.mkdir()
    kept.chmod(0o777)
    look = (
        LOOK.replace("SECRET", repr(str(secret)))
        .replace("GIVEN", repr(str(given)))
        .replace("KEPT", "'/kept'")
    )
    line = bubblewrap.command(
        [sys.executable, "-c", look],
        read=[*bubblewrap.python_folders(), str(given)],
        write={str(kept): "/kept"},
        folders={"/tmp": 1 << 20},
        environment={"KNOWN": "yes"},
        uid=number,
    )
    ended = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout)
    assert seen["uid"] == (number or os.getuid())
    assert seen["given"] == "given"
    assert seen["secret"] == "2"
    assert seen["passwd"] == "2"
    assert "secret" not in seen["first"]
    assert seen["interfaces"] == 1
    assert int(seen["capabilities"], 16) == 0
    assert seen["kept"] == 1
    assert (kept / "x").read_text(encoding="utf-8") == "0"
    assert seen["usr"] == 30
    assert seen["full"] == 28
    assert seen["environment"]["KNOWN"] == "yes"
    assert "A_TOKEN" not in seen["environment"]


def test_root_must_name_a_user_and_another_user_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    for euid, uid in ((0, None), (0, 0), (1000, 61184)):
        monkeypatch.setattr(os, "geteuid", lambda euid=euid: euid)
        with pytest.raises(ValueError, match="uid must be"):
            bubblewrap.command(["true"], uid=uid)


def test_a_claimed_user_is_free_again_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "USERS", range(61200, 61202))
    first, second = bubblewrap.free_user(), bubblewrap.free_user()
    assert {first.number, second.number} == {61200, 61201}
    with pytest.raises(bubblewrap.NoUser):
        bubblewrap.free_user()
    first.close()
    assert bubblewrap.free_user().number == first.number
