"""How a person solves each shipped desktop task: the turns of an episode, in the UI-TARS grammar."""

from __future__ import annotations

from collections.abc import Mapping

HOME = "/home/user"


def key(*keys: str) -> str:
    return f"hotkey(key='{' '.join(keys)}')"


def typed(text: str) -> str:
    text = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t")
    return f"type(content='{text}')"


SAVE = key("ctrl", "s")
END = key("ctrl", "end")
START = key("ctrl", "home")


def saved_as(path: str) -> list[str]:
    return [key("ctrl", "shift", "s"), key("ctrl", "a"), typed(f"{HOME}/{path}"), key("enter")]


SOLUTIONS: Mapping[str, list[str]] = {
    "append-line": [END, typed("water the plants\n"), SAVE],
    "delete-word": ["left_double(start_box='(335,206)')", key("delete"), SAVE],
    "replace-all": [
        key("ctrl", "a"),
        typed(
            "The color of the door is red.\nThe color of the roof is grey.\nNobody likes the color"
            " of the fence.\n"
        ),
        SAVE,
    ],
    "new-note": [typed("Happy birthday, Zoë!\n"), *saved_as("Documents/card.txt")],
    "change-setting": [
        START,
        key("down"),
        key("down"),
        key("end"),
        key("backspace"),
        key("backspace"),
        key("backspace"),
        key("backspace"),
        typed("9090"),
        SAVE,
    ],
    "save-as": saved_as("Documents/agenda.txt"),
    "sort-lines": [typed("sort Data/fruit.txt > sorted.txt\n")],
    "count-errors": [typed("grep -c ERROR Data/service.log > errors.txt\n")],
    "sum-expenses": [
        typed("awk -F, 'NR > 1 {s += $2} END {print s}' Data/expenses.csv > total.txt\n")
    ],
    "find-letter": [typed("cd Data/letters; grep -l harbour * > ~/answer.txt\n")],
    "move-into-folder": [
        typed("cd Documents && mkdir Archive && mv draft.txt meeting.txt Archive\n")
    ],
    "run-script": [typed("Data/build.sh\n")],
    "rename-file": [typed("draft"), key("esc"), key("f2"), key("ctrl", "a"), typed("final.txt\n")],
    "make-folder": [key("ctrl", "shift", "n"), typed("Invoices\n")],
    "copy-picture": [
        typed("beach"),
        key("esc"),
        key("ctrl", "c"),
        key("ctrl", "l"),
        typed(f"{HOME}/Documents\n"),
        key("ctrl", "v"),
    ],
    "note-from-another": [END, typed("room 4\n"), SAVE],
}
