"""Shell scripts as far as launch lines need them: quotes, continued lines, variables, arrays, files written in place.

Nothing is run. Where a branch could set a variable, its first value holds; what only a running machine knows stays as
it is written, ``$(hostname)``, and is an error where a setting needs it.
"""

import re
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.launch.facts import read_facts
from windtunnel.launch.line import Line, parse_line

HEREDOC = re.compile(
    r"^(?P<head>[^\n#]*<<-?\s*(?P<q>['\"]?)(?P<end>\w+)(?P=q)[^\n]*)\n(?P<body>.*?)\n\s*(?P=end)[ \t]*$", re.M | re.S
)
TARGET = re.compile(r">>?\s*([^\s<>|&;]+)|tee\s+(?:-a\s+)?([^\s<>|&;]+)")
NAME = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(\[[@*]\])?(?::?([-=+?])([^{}]*(?:\{[^{}]*\}[^{}]*)*))?\}|\$([A-Za-z_]\w*)")
LEADING = (
    "exec",
    "nohup",
    "then",
    "do",
    "else",
    "{",
    "(",
    "env",
    "time",
    "sudo",
    "export",
    "local",
    "declare",
    "readonly",
    "set",
    "!",
)
"""Words before a command, or an assignment, that do not change what it says."""
BRANCHES = {"if": 1, "case": 1, "fi": -1, "esac": -1}
FACTS = re.compile(r"^\s*# windtunnel: (.*)$", re.M)
SWITCHES = re.compile(r"^-[a-zA-Z]$")


@dataclass
class Shell:
    """Variables while a script is read."""

    variables: dict[str, list[str]] = field(default_factory=dict)
    depth: int = 0

    def assign(self, name: str, values: list[str], *, more: bool) -> None:
        """Set a variable or array; inside of branches only one that has no value."""
        if more:
            self.variables[name] = self.variables.get(name, []) + values
        elif not (self.depth and self.variables.get(name)):
            self.variables[name] = values

    def value(self, match: re.Match[str]) -> str:
        """What stands for a variable; its text as it is where nothing is known."""
        name, array, kind, default = match[1] or match[5], match[2], match[3], match[4]
        known = self.variables.get(name)
        if kind == "+":
            return self.expanded(default) if known else ""
        if known:
            return " ".join(known)
        if kind in ("-", "="):
            return self.expanded(default)
        return "" if array else match[0]

    def expanded(self, text: str) -> str:
        """Text with the variables that are known."""
        return VARIABLE.sub(self.value, text)


def read_script(text: str, folder: Path = Path()) -> list[Line]:
    """The servers that a script, or a single command, starts. Raises InputError as ``parse_line``."""
    files: dict[str, str] = {}

    def keep(match: re.Match[str]) -> str:
        if found := TARGET.search(match["head"]):
            files[(found[1] or found[2]).strip("'\"")] = match["body"]
        return ""

    facts: dict[str, Any] = {}
    for found in FACTS.findall(text):
        facts |= read_facts(found)
    script = HEREDOC.sub(keep, text.replace("\r\n", "\n"))
    shell, lines = Shell(), []
    for statement in statements(script):
        for command in _commands(shell, statement):
            words = command
            env = {name: " ".join(values) for name, values in shell.variables.items()}
            while words and (found := NAME.fullmatch(words[0])):
                env[found[1]], words = found[3], words[1:]
            wanted = {name: shell.expanded(body) for name, body in files.items()}
            line = parse_line(words, env, wanted, folder)
            if line is not None:
                lines.append(Line(**{**vars(line), "facts": {**line.facts, **facts}}))
    return lines


def _commands(shell: Shell, statement: str) -> Iterator[list[str]]:
    """The words of a command, after assignments are noted; of what ``bash -c`` runs, those in it."""
    first = statement.split(None, 1)[0] if statement.split() else ""
    shell.depth = max(0, shell.depth + BRANCHES.get(first, 0))
    words = split_words(statement, shell)
    while words and (words[0] in LEADING or (SWITCHES.match(words[0]) and len(words) > 1)):
        words = words[1:]
    if words and all(NAME.fullmatch(word) or word == ARRAY for word in words):
        for word in words:
            found = NAME.fullmatch(word)
            if found and not found[3].startswith("("):
                shell.assign(found[1], [found[3]] if found[3] else [], more=bool(found[2]))
        return
    if array := ASSIGNED.match(statement.strip()):
        shell.assign(array[1], split_words(array[3], shell), more=bool(array[2]))
        return
    for place, word in enumerate(words[:-1]):
        if word in ("-c", "-lc", "-ec", "-xc") and place and words[place - 1].rsplit("/", 1)[-1] in ("bash", "sh"):
            for inner in statements(words[place + 1]):
                yield from _commands(shell, inner)
            return
    if words:
        yield words


ARRAY = "()"
ASSIGNED = re.compile(r"(?:export |local |declare -a )?([A-Za-z_]\w*)(\+?)=\((.*)\)\s*$", re.S)


def statements(script: str) -> Iterator[str]:
    """The statements of a script: ended by a line, ``;``, ``&`` or ``|`` outside of quotes and brackets."""
    text = re.sub(r"\\\n", " ", script)
    start, place, quote, depth = 0, 0, "", 0
    parts: list[str] = []
    while place < len(text):
        letter = text[place]
        if quote:
            if letter == "\\" and quote == '"':
                place += 1
            elif letter == quote:
                quote = ""
        elif letter == "\\":
            place += 1
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (place == 0 or text[place - 1] in " \t\n;("):
            parts.append(text[start:place])
            while place < len(text) and text[place] != "\n":
                place += 1
            start = place
            continue
        elif text[place : place + 2] in ("$(", "=("):
            depth += 1
            place += 1
        elif letter == "(" and depth:
            depth += 1
        elif letter == ")" and depth:
            depth -= 1
        elif not depth and (letter in "\n;|" or (letter == "&" and text[place - 1 : place] != ">")):
            yield "".join([*parts, text[start:place]]).strip()
            parts, start = [], place + 1
        place += 1
    yield "".join([*parts, text[start:]]).strip()


def split_words(statement: str, shell: Shell) -> list[str]:
    """The words of a statement as bash splits them: variables are filled in, redirections left out."""
    return _without_redirections(_Splitting(statement, shell).run())


@dataclass
class _Splitting:
    """A statement while it is cut into words."""

    text: str
    shell: Shell
    place: int = 0
    word: list[str] | None = None
    words: list[str] = field(default_factory=list)

    def run(self) -> list[str]:
        steps = {
            " ": self._blank,
            "\t": self._blank,
            "\n": self._blank,
            "'": self._plain,
            '"': self._quoted,
            "$": self._variable,
        }
        while self.place < len(self.text):
            steps.get(self.text[self.place], self._letter)()
        self._blank()
        return self.words

    def _add(self, text: str) -> None:
        self.word = [*(self.word or []), text]

    def _blank(self) -> None:
        if self.word is not None:
            self.words.append("".join(self.word))
        self.word = None
        self.place += 1

    def _letter(self) -> None:
        escaped = self.text[self.place] == "\\"
        self._add(self.text[self.place + escaped : self.place + escaped + 1])
        self.place += 1 + escaped

    def _plain(self) -> None:
        end = self.text.find("'", self.place + 1)
        end = len(self.text) if end < 0 else end
        self._add(self.text[self.place + 1 : end])
        self.place = end + 1

    def _quoted(self) -> None:
        end = _closing(self.text, self.place + 1)
        inner = self.text[self.place + 1 : end]
        self.place = end + 1
        if array := re.fullmatch(r"\$\{(\w+)\[@\](?::?[-+][^}]*)?\}", inner):
            self._several(self.shell.variables.get(array[1], []))
        else:
            self._add(re.sub(r"\\([\"\\$`])", r"\1", self.shell.expanded(inner)))

    def _variable(self) -> None:
        if found := VARIABLE.match(self.text, self.place):
            self.place = found.end()
            values = _values(self.shell, found)
            assigns = self.word is not None and NAME.fullmatch("".join(self.word))
            self._several([" ".join(values)] if assigns else values)  # nothing that is assigned is cut
        elif self.text.startswith("$(", self.place):
            end = _bracket(self.text, self.place + 1)
            self._add(self.text[self.place : end])
            self.place = end
        else:
            self._letter()

    def _several(self, values: list[str]) -> None:
        """Values that are words of their own; the first and last join what they touch."""
        for place, value in enumerate(values):
            if place:
                self.words.append("".join(self.word or []))
                self.word = None
            self._add(value)


def _values(shell: Shell, found: re.Match[str]) -> list[str]:
    """What an unquoted variable becomes: its values, cut at blanks; JSON that stands in one stays whole."""
    known = shell.variables.get(found[1] or found[5])
    if known and len(known) > 1:
        return known
    text = shell.value(found)
    return [text] if text[:1] in "{[" else text.split()


def _closing(text: str, place: int) -> int:
    while place < len(text) and text[place] != '"':
        place += 2 if text[place] == "\\" else 1
    return place


def _bracket(text: str, place: int) -> int:
    """After the bracket that closes the one at this place."""
    depth = 0
    while place < len(text):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        place += 1
        if not depth:
            break
    return place


def _without_redirections(words: list[str]) -> list[str]:
    found: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif re.fullmatch(r"\d?(>>?|<)", word) or word == "&>":
            skip = True
        elif not re.match(r"^(\d?>>?|<|&>)[^<>{]", word) or (word.startswith("<") and word.endswith(">")):
            found.append(word)
    return found
