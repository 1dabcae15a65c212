"""Writes the digits dataset.

``python -m rayloop data prepare digits --out DIR`` makes train.jsonl and eval.jsonl in DIR.
"""

from collections.abc import Sequence

from rayloop.recipes import preparer, write_rows
from rayloop.recipes.digits.data import rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both files. Returns exit code 0."""
    parser = preparer("digits", __doc__)
    parser.add_argument("--train", type=int, default=2000, help="training rows")
    parser.add_argument(
        "--eval", type=int, default=200, help="evaluation rows, none of which is a training row"
    )
    parser.add_argument("--shortest", type=int, default=3, help="fewest digits")
    parser.add_argument("--longest", type=int, default=5, help="most digits")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        train, evaluation = rows(
            options.train, options.eval, options.shortest, options.longest, options.seed
        )
    except ValueError as error:
        parser.error(str(error))
    write_rows(options.out, "train", train)
    write_rows(options.out, "eval", evaluation)
    return 0
