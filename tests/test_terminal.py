"""The gate for the terminal: no text of others commands it."""

import io

import pytest

from nanogpt_cli.terminal import escaped, for_stream


@pytest.mark.parametrize(
    "character", ["\x1b", "\x00", "\r", "\x07", "\x7f", "\x85", "\x9b", "\u202e", "\u2066", "\udc9b"]
)
def test_what_commands_is_written_out(character: str) -> None:
    text = escaped(f"a{character}b")
    assert character not in text
    assert text.startswith("a\\")
    assert text.isprintable()


def test_what_people_write_stays() -> None:
    text = "Grüße,\n\tשלום 你好 👩‍🔬 é"
    assert escaped(text) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_every_byte() -> None:
    assert for_stream("\x1b[2J", io.StringIO()) == "\x1b[2J"
    assert for_stream("\x1b[2J", Terminal()) == "\\x1b[2J"
