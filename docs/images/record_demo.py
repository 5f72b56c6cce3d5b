"""Draws demo.svg: what `make demo` shows in a terminal. Introduced in phase 3.

    python docs/images/record_demo.py [--model MODEL] [--columns N] [--out FILE]

The commands of the Makefile's demo run in a pseudo-terminal, so that they behave as they do for a person; what they
write is replayed on a screen of our own, and the screen becomes an SVG. Only the ladder's last line, JSON for other
programs, is left out. The figures in the picture are those of the machine that draws it: let nothing else run there.
"""

import io
import os
import pty
import re
import shlex
import subprocess
import sys
import termios
from xml.etree import ElementTree

from recording import DEMO_MODEL, INFER, ROOT, add_model, parser
from rich.cells import cell_len
from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

ROWS = 40
RESET = "\x1b[0m"
PROMPT = "\x1b[1;32m$\x1b[0m "
# Rich's template loads a font from the network; a reader's own monospaced one does as well.
SVG_FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
# A control sequence (its numbers, its letter), a title for the window, or one character.
_TOKEN = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\].*?(?:\x07|\x1b\\)|(.)", re.DOTALL)


class Screen:
    """A terminal as far as our commands use one: text in styles, and a cursor that moves and erases."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.rows: list[list[tuple[str, str]]] = [[]]  # (character, style) of each cell
        self.row = self.column = 0
        self.style = ""

    def feed(self, text: str) -> None:
        """Show what a program has written."""
        for token in _TOKEN.finditer(text):
            numbers, letter, character = token.groups()
            if letter is not None:
                self._control(numbers, letter)
            elif character == "\n":
                self._move(self.row + 1, self.column)
            elif character == "\r":
                self.column = 0
            elif character == "\b":
                self.column = max(0, self.column - 1)
            elif character is not None and character.isprintable():
                self._put(character)

    def text(self) -> str:
        """The screen's lines, with the control sequences of their styles."""
        return "\n".join(_styled(row) for row in self.rows).rstrip("\n")

    def _put(self, character: str) -> None:
        width = cell_len(character)
        if self.column + width > self.columns:
            self._move(self.row + 1, 0)
        row = self.rows[self.row]
        row += [(" ", "")] * (self.column - len(row))
        if width == 0:  # belongs to the character before it
            if self.column:
                row[self.column - 1] = (row[self.column - 1][0] + character, row[self.column - 1][1])
            return
        row[self.column : self.column + width] = [(character, self.style), *[("", self.style)] * (width - 1)]
        self.column += width

    def _control(self, numbers: str, letter: str) -> None:
        count = int(numbers) if numbers.isdecimal() else 0
        row = self.rows[self.row]
        if letter == "m":
            plain = numbers in ("", "0")
            self.style = "" if plain else self.style + f"\x1b[{numbers}m"
        elif letter in "AB":
            self._move(max(0, self.row + (count or 1) * (1 if letter == "B" else -1)), self.column)
        elif letter in "CD":
            self.column = max(0, self.column + (count or 1) * (1 if letter == "C" else -1))
        elif letter == "G":
            self.column = max(1, count) - 1
        elif letter == "K" and count == 0:
            del row[self.column :]
        elif letter == "K" and count == 2:
            row.clear()

    def _move(self, row: int, column: int) -> None:
        self.rows += [[] for _ in range(row + 1 - len(self.rows))]
        self.row, self.column = row, column


def demo_commands(model: str = DEMO_MODEL) -> list[list[str]]:
    """The `infer` commands of the Makefile's demo that show something, as words, for ``model``."""
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    lines = re.findall(r"^\t@?\$\(BIN\)/infer (.*)$", recipe[1] if recipe else "", re.MULTILINE)
    commands = [["infer", *shlex.split(line)] for line in lines]
    shown = [command for command in commands if command[1] in ("generate", "ladder")]
    return [[model if word == DEMO_MODEL else word for word in command] for command in shown]


def typed(command: list[str], columns: int) -> str:
    """A command as one would type it, continued on further lines where it is too long."""
    lines = [""]
    for word in map(_quoted, command):
        if lines[-1] and len(lines[-1]) + len(word) + 5 > columns:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\r\n".join(lines)


def run(command: list[str], columns: int) -> str:
    """What a command of `infer` writes to a terminal; ends this program if the command fails."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        [*INFER, *command[1:]],
        cwd=ROOT,
        env=environment | {"TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = bytearray()
    try:
        while part := os.read(ours, 1 << 16):
            written += part
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    text = written.decode(errors="replace")
    if process.wait() != 0:
        raise SystemExit(f"{shlex.join(command)} ended with {process.returncode}:\n{text}")
    return text


def without_json(output: str) -> str:
    """Output without a last line that is JSON."""
    body, _, last = output.rstrip().rpartition("\n")
    return body.rstrip() if last.startswith("{") else output.rstrip()


def draw(screen: Screen, title: str) -> str:
    """The screen as an SVG."""
    console = Console(record=True, file=io.StringIO(), width=screen.columns, force_terminal=True, emoji=False)
    console.print(Text.from_ansi(screen.text()), no_wrap=True, crop=False, highlight=False)
    svg = console.export_svg(title=title, code_format=SVG_FORMAT, unique_id="demo")
    ElementTree.fromstring(svg)  # nothing that a model said may break the picture
    return svg


def _quoted(word: str) -> str:
    return word if shlex.quote(word) == word else f'"{word}"'


def _styled(row: list[tuple[str, str]]) -> str:
    out, current = "", ""
    for character, style in row:
        if style != current:
            out, current = out + RESET + style, style
        out += character
    return out + (RESET if current else "")


def main() -> None:
    arguments = parser("Draw what `make demo` shows.", "demo.svg")
    add_model(arguments)
    arguments.add_argument("--columns", type=int, default=100, help="width of the terminal (default: %(default)s)")
    options = arguments.parse_args()

    screen = Screen(options.columns)
    for number, command in enumerate(demo_commands(options.model)):
        print(shlex.join(command), file=sys.stderr)
        output = without_json(run(command, options.columns))
        gap = "\r\n\r\n" if number else ""
        screen.feed(f"{gap}{PROMPT}{typed(command, options.columns)}\r\n{output}{RESET}")
    options.out.write_text(draw(screen, "make demo"), encoding="utf-8")
    print(f"wrote {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
