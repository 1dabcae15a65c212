"""Hints in a question's wording for the comparison of answers.

The wording may ask for a code, a year, an option, a percentage or a notation, or be negated.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from rayloop.judge.rules.plain import CHARACTERS, plain, same_text

_NEAREST = (
    r"nearest (?:\w+"
    r" )?(?:whole|integer|tens?|tenths?|hundred\w*|thousand\w*|million|cent|dollar|degree|percent)"
)
_MEASURE = (
    "value|price|cost|percentage|percent|share|proportion|rate|revenue|profit|income|average|mean"
    "|median|area|volume|length|height|width|distance|weight|mass|speed|slope|perimeter"
    "|probability|difference"
)
_UNITS = (
    "(?:square |cubic )?"
    "(?:(?:milli|centi|kilo)?(?:met(?:re|er)|gram|lit(?:re|er))s?"
    "|[mck]?m|[mk]?g|m?l|ha|hectares?|seconds?|sec|min(?:ute)?s?|hours?|days?)"
)
_SENTENCE = re.compile(r"[.!?]\s+|\n")
_ASKS_MONEY = re.compile(
    r"(?:^|, )(?:"
    r"how much (?:more |less )?(?:money|profit|revenue|income|change|tax)\b"
    r"|(?:how much|what) (?:did|does|do|will|would|should|must|can) (?:[\w']+"
    r" ){1,4}(?:cost|pay|spend|earn|owe|charge)\b"
    r"|what(?:'s| is| was| will be| would be) (?:the |her |his |their |its )?"
    r"(?:(?:total|average|final|full|original|new|sales?)"
    r" ){0,3}(?:cost|price|profit|revenue|income|salary|fee|bill)"
    r"(?= (?:of|for|in|at|per|if|after|before)\b|$)"
    r").*",
    re.IGNORECASE,
)
_NO_AMOUNT = re.compile(
    r"%|\b(?:per ?cent\w*|ratio|fraction|share|margin|growth|increase|cents?|pence|times)\b",
    re.IGNORECASE,
)
_SCALES = re.compile(
    r"\b(?:thousands?|millions?|billions?|trillions?|lakhs?|crores?|dozens?|bn|mn)\b", re.IGNORECASE
)
_CURRENCIES = {
    "$": r"\$|\bdollars?\b|\busd\b",
    "€": r"€|\beuros?\b|\beur\b",
    "£": r"£|\bpounds?\b|\bgbp\b",
    "¥": r"¥|\byen\b|\bjpy\b",
    "others": (
        r"[₹₩₽₺₫₴₪฿]|\b(?:rupees?|rs|inr|yuan|rmb|cny|francs?|chf|pesos?|won|krw|roubles?|rubles?"
        r"|lira|kr|reais|rand)\b"
    ),
}
_BOTH = re.compile(
    r"\b(?:yes|true|correct|right)\b\W{1,4}(?:(?:or|and)\W{1,4})?(?:no|false|incorrect|wrong)\b",
    re.IGNORECASE,
)
_NEGATED = re.compile(
    r"\b(?:not|no|never|none|nothing|nobody|neither|nor|cannot|without|lack\w*|absent|missing"
    r"|fail\w*|den(?:y|ies|ied)|disagree\w*|false|wrong|incorrect\w*|untrue|invalid|unable"
    r"|impossible|mistaken|lies?|lying|myth|fake|hoax|contradict\w*|refut\w+|reject\w*)\b"
    r"|n['’]t\b",
    re.IGNORECASE,
)
_HOW_TO_ANSWER = re.compile(
    r"\b(?:answer|respond|reply)(?: the question)?(?: only| directly| briefly)?"
    r" (?:with|using|in|by)\b[^.?!\n]{0,40}?\b"
    r"(?:(?:single|one|few) (?:words?|phrase)(?: or (?:a )?(?:short )?phrase)?"
    r"|letters?(?= ?(?:$|[.?!\n]|only|of the (?:correct|right|option|best|answer))))",
    re.IGNORECASE,
)
_FIRST = re.compile(r"(?:^|[\s(\[])(?:1\s?[).:\]]|①)\s*\S")
_SECOND = re.compile(r"(?:^|[\s(\[])(?:2\s?[).:\]]|②)\s*\S")
_CIRCLED = str.maketrans({0x2460 + i: f"{i + 1})" for i in range(20)})
_MARKER = re.compile(r"(?:^|(?<=[\s(\[,;*]))([A-Ja-j])(?:[).:\]](?![A-Za-z]?\.)|、)")
_LOOSE_MARKER = re.compile(r"(?:^|(?<=[\s(\[,;*]))([A-Ja-j])(?:[).:\]]|、| is | ?[=–-] )")
_LAST_SINGLE_CHARACTER = re.compile(r"(?:^|[^\W\d_]\s)(\w)\W*$")
_OPTION = re.compile(
    r"(?:(?:option|choice)"
    r" )?(?:\(\s?([A-Za-z])\s?\)|\[\s?([A-Za-z])\s?\]|([A-Za-z])(?=\s?[.):]|$))\s?[.):]?\s?(.*)",
    re.IGNORECASE | re.DOTALL,
)


def _matches(pattern: str) -> cached_property[bool]:
    """A property of Question: whether its text matches the pattern anywhere, in any case."""
    compiled = re.compile(pattern, re.IGNORECASE)
    return cached_property(lambda question: compiled.search(question.asked) is not None)


def _mentions(*lines: str) -> cached_property[bool]:
    """A property of Question: whether its text has one of these words and phrases.

    Commas separate them in each line.
    """
    phrases = ", ".join(lines).split(", ")
    return _matches(rf"\b(?:{'|'.join(phrases)})\b")


@dataclass(frozen=True)
class Question:
    """A question's text and the hints in it.

    ``exact`` (formulas): letters keep their case, and numbers are meant as numbers. A hint makes
    rules more careful, or says that a number is one.
    """

    text: str = ""
    exact: bool = False

    @cached_property
    def asked(self) -> str:
        """The text without "answer with a single word" and the like.

        Such an instruction does not ask for the wording of something.
        """
        return _HOW_TO_ANSWER.sub(" ", self.text)

    @cached_property
    def blank(self) -> bool:
        """Whether the question is empty."""
        return not self.text.strip()

    names_code = _mentions(
        r"versions?, zip, postal, post ?code, codes?, phone, telephone, fax, serial, plate,"
        r" licen[cs]e, ids?, isbn, pages?",
        r"chapter, section, verse, scores?, scored, result, clock, o'?clock, (?:what|which) time,"
        r" opening hours, dates?, day",
        r"month, signature, indicator, room, route, flight, gate, platform, extension, channel,"
        r" model, address",
        r"(?:what|which) numbers?, digits?, printed, written, jersey, odds, account, passwords?,"
        r" pin, label, sign, screen",
        r"display(?:ed)?, ip, identifier, number on, tempo, rhythm, beat, (?:the|what|which)"
        r" met(?:er|re), releases?",
    )
    how_many = _mentions("how many")
    names_year = _mentions("years?, when, decades?, dates?")
    asks_year = _matches(
        r"^\W*(?:\w+ )?(?:what|which)(?: \w+)? (?:years?|decade)\b|^\W*(?:when|years?)\b"
    )
    times = _mentions(
        "time, clock, o'?clock, hour, hour hand, when, opens?, closes?, departure, arrival"
    )
    angles = _mentions(
        r"angles?, degrees?, rotat\w*, turn\w*, bearing, heading, direction, argument"
    )
    wording = _mentions(
        r"words?, letters?, text, names?, named, titles?, called, phrase, button, whom?, written",
        r"(?:what|which) (?:symbols?|characters?), spell\w*, reads?, says?, inscri\w+, captions?,"
        r" printed, label\w*",
    )
    """May ask for the very word or name, where SEVEN is not 7, TRUE not yes and The Who not who."""
    case = _mentions(
        r"letters?, case, capital\w*, upper\w*, lower\w*, passwords?, exactly, plate, captcha,"
        r" licen[cs]e, serial, variables?",
        r"symbols?, units?, codes?, formulas?, formulae, compounds?, elements?, genotypes?,"
        r" alleles?, genes?",
    )
    marks = _mentions("symbols?, punctuation, characters?, operators?, operation, marks?, morse")
    """May ask for a punctuation mark."""
    scales = _mentions(
        r"hundreds?, thousands?, millions?, billions?, trillions?, lakhs?, crores?, dozens?,"
        r" pairs?, bn, mn, k, 0?00s?",
        r"1,000s?, 1000s?",
    )
    """Names thousands or millions: it may say in which of them the answer is."""
    roughly = _mentions(rf"approx\w*, roughly, estimat\w*, about how, round(?:ed|ing)?, {_NEAREST}")
    computes = _mentions(r"comput\w+, calculat\w+, solve\w*, evaluat\w+")
    names_measure = _matches(
        rf"^\W*(?:(?:what|how much)(?:'s| is| was| are| were) the (?:[a-z]+ ){{0,2}}(?:{_MEASURE})"
        r"(?: (?:of|for|in|at|between|per)\b|\W*$)"
        r"|how (?:much|far|tall|wide|heavy|deep|high)\b|what"
        r" (?:percentage|percent|share|proportion)\b)"
    )
    names_place = _mentions(
        r"ticks?, intervals?, rank\w*, \w+tiles?, exact\w*, rounds?, steps?, index, levels?,"
        r" grades?, sizes?, ages?, axis, axes",
        "scale, generation, bins?, group, p-value, numbers?, count, counts, times?",
    )
    picks = _matches(r"^\W*(?:\w+ )?(?:which|where|when|who|whose)\b")
    """Asks for one of several things, whose name may look like a number."""
    forms = _mentions(
        r"convert\w*, express\w*, simplif\w*, simplest, lowest terms, reduced?, decimals?,"
        r" fractions?, mixed number, improper",
        r"scientific, standard form, notation, in (?:words|figures|digits|numerals),"
        r" round(?:ed|ing)?, significant, binary, roman",
        rf"hex\w*, form of, as a percent\w*, {_NEAREST}",
    )
    """May ask for a way to write a number: 0.5 and not 1/2."""
    units = _mentions(rf"convert\w*, express\w*, units?, (?:in|how many|into|to) {_UNITS}")
    """May ask for a unit: 5000 m where the question gives 5 km."""
    names_percent = _matches(
        r"^\W*(?:what|which|how many)(?:'s| is| was| are| were)?(?: the)?(?: \w+)? (?:percent|per"
        r" cent|percentage)\b"
        r"|\bin (?:percent\b|%)"
    )
    names_points = _matches(r"\bof\s+\$?[0-9]|\bpoints?\b")
    asks_yes_or_no = _matches(
        r"(?:^\W*|[.!]\s+)(?:is|are|was|were|am|do|does|did|can|could|has|have|had|will|would"
        r"|should|shall|may|might|must)\b"
        r"|\byes\b.{0,12}\bno\b|\btrue\b.{0,12}\bfalse\b"
    )

    @cached_property
    def asks_money(self) -> bool:
        """Asks, in its last sentence, for an amount of money.

        False for a share of an amount, and for an amount in thousands or cents.
        """
        last_sentence = _SENTENCE.split(self.asked.rstrip(" \n\t.?!"))[-1]
        demand = _ASKS_MONEY.search(last_sentence)
        if demand is None or _NO_AMOUNT.search(demand.group()):
            return False
        return not _SCALES.search(self.text)

    @cached_property
    def currencies(self) -> frozenset[str]:
        """The signs of the currencies that it names ($, €, £, ¥), and "others"."""
        return frozenset(
            sign
            for sign, pattern in _CURRENCIES.items()
            if re.search(pattern, self.text, re.IGNORECASE)
        )

    @cached_property
    def codes(self) -> bool:
        """May ask for a code, version, score, date or time, where 1.10 is not 1.1."""
        return self.names_code and not self.how_many

    @cached_property
    def number(self) -> bool:
        """Asks for a number that is measured or computed: zeros at its end are not part of it."""
        if self.codes or self.times or self.picks:
            return False
        return self.measured or self.computes or (self.exact and self.blank)

    @cached_property
    def measured(self) -> bool:
        """Begins by asking for a measure ("what is the price of").

        False when it names a place on a scale.
        """
        return self.names_measure and not self.codes and not self.names_place

    @cached_property
    def negated(self) -> bool:
        """Is negated, so that yes may mean no: "is it false that cats can fly?"."""
        return _NEGATED.search(_BOTH.sub(" ", self.asked)) is not None

    @cached_property
    def numbered(self) -> bool:
        """Offers options 1, 2, ..., so that a number may name one."""
        first = _FIRST.search(self.text)
        return first is not None and _SECOND.search(self.text, first.end()) is not None

    @cached_property
    def options(self) -> dict[str, str]:
        """The plain texts of the lettered options by letter (upper case).

        Empty unless there are at least A and B, and when they are ambiguous. Every text is "" when
        two are equal, or when the question continues after the last one.
        """
        if self.ambiguous:
            return {}
        texts, rest = self._strict_options
        distinct = len(set(texts.values())) == len(texts) and all(texts.values())
        return texts if distinct and "?" not in rest else dict.fromkeys(texts, "")

    @cached_property
    def ambiguous(self) -> bool:
        """An option's text is, or ends with, another one's letter: "A. B B. A".

        A letter could then mean either.
        """
        loose_texts, _ = self._lettered_options(_LOOSE_MARKER)
        strict_texts, _ = self._strict_options
        texts = loose_texts | strict_texts
        for letter, text in texts.items():
            last_character = _LAST_SINGLE_CHARACTER.search(text)
            if last_character and last_character.group(1).upper() in texts.keys() - {letter}:
                return True
        return False

    @cached_property
    def _strict_options(self) -> tuple[dict[str, str], str]:
        return self._lettered_options(_MARKER)

    def _lettered_options(self, pattern: re.Pattern[str]) -> tuple[dict[str, str], str]:
        """The options' plain texts by letter, and the text after the last marker."""
        question = self.text.translate(CHARACTERS)
        markers = _consecutive_markers(question, pattern)
        if len(markers) < 2:
            return {}, ""
        ends = [marker.start() for marker in markers[1:]] + [len(question)]
        texts = {}
        for marker, end in zip(markers, ends, strict=True):
            first_line = question[marker.end() : end].strip().split("\n")[0]
            texts[marker.group(1).upper()] = self.plain(first_line.strip(" ([,;*"))
        return texts, question[markers[-1].end() :]

    def plain(self, text: str) -> str:
        """The plain text of a reference or an answer to this question."""
        return plain(text, exact=self.exact, articles=self.wording)

    def same_text(self, first: str, second: str) -> bool:
        """Whether two plain texts are equal, apart from harmless case."""
        return same_text(first, second, strict=self.exact or self.case)

    def offers(self, mark: str) -> bool:
        """Whether a mark is an option's text: "(A) : (B) ;"."""
        mark = mark.strip()
        if mark not in self.text:
            return False
        return re.search(rf"[).:\]]\s*{re.escape(mark)}(?!\S)", self.text) is not None

    def holds(self, number: str) -> bool:
        """Whether the question has a number: an answer that repeats it may not be an answer."""
        number = number.lstrip("+-")
        if number not in self.text:
            return False
        return re.search(rf"(?<![0-9.]){re.escape(number)}(?![0-9])", self.text) is not None

    def labels(self, first: str, second: str) -> bool:
        """Whether one number is the label of the other: "2 = 20", "Option 2 is 20", "2: 20"."""
        text = self.text.translate(_CIRCLED)
        # The search for a text is fast, and rules out most questions.
        if first not in text or second not in text:
            return False
        pair = (
            rf"(?<![\w.,]){re.escape(first)} ?(?:[).:\]=–-]|is\b)?"
            rf" ?{re.escape(second)}(?!\w|[.,][0-9])"
        )
        return re.search(pair, text) is not None


def option(text: str) -> tuple[str, str] | None:
    """The letter as written and the text of an option that is a plain text.

    An option is ``B``, ``(B)``, ``B. red`` or ``option B``; None for anything else.
    """
    match = _OPTION.fullmatch(text)
    if match is None:
        return None
    in_parentheses, in_brackets, bare, words = match.groups()
    return in_parentheses or in_brackets or bare, words.strip()


def _consecutive_markers(question: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The markers of A, B, C, ... in this order, all in the case of the first."""
    markers: list[re.Match[str]] = []
    for marker in pattern.finditer(question):
        letter = marker.group(1)
        same_case = not markers or letter.isupper() == markers[0].group(1).isupper()
        if same_case and letter.upper() == chr(ord("A") + len(markers)):
            markers.append(marker)
    return markers
