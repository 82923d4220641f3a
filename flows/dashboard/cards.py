"""HTML cards and tables: prompts with their answers, marked as right or wrong, special tokens as badges.

This is the only HTML of the pages that contains text from models and the web. All such text passes through
`Markup.format` or `tokens_marked`, which escape it; Streamlit sanitises the result again.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import streamlit as st
from markupsafe import Markup, escape

from nautile.common.text import visible
from nautile.flows.dashboard.shared import split_thinking

LONGEST_OPEN = 1200  # characters; longer texts are folded
SIGNS = {True: ("good", "✓"), False: ("bad", "✗"), None: ("open", "—")}
_TOKEN = re.compile(r"<\|([A-Za-z0-9_]{1,40})\|>")
_LAST_TOKEN = re.compile(r"\s+(<\|[A-Za-z0-9_]{1,40}\|>)\s*$")  # to put its badge on the line of the last word
_STYLE = """<style>
.group { border: 1px solid light-dark(#c9ccd3, #444c56); border-radius: .5rem; padding: .6rem .7rem; margin: 0 0 1rem;
  background: light-dark(#fbfbfc, #161a22); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr)); gap: .6rem; }
.cards, .card-head { font-size: .875rem; color: light-dark(#262730, #e6edf3); }
.cards article { border: 1px solid light-dark(#d5d8de, #444c56); border-left: .3rem solid #8a8f98; border-radius: .4rem;
  padding: .4rem .6rem; min-width: 0; background: light-dark(#fff, #0e1117); }
.cards article.good { border-left-color: light-dark(#1a7f37, #3fb950); }
.cards article.bad { border-left-color: light-dark(#c62828, #ff7b72); }
.cards .good .sign { color: light-dark(#146c2e, #56d364); } .cards .bad .sign { color: light-dark(#b71c1c, #ff9b93); }
.cards .sign { font-weight: 700; } .card-head { margin: 0 0 .4rem; }
.cards p, .card-head p { margin: 0 0 .25rem; }
.cards .facts, .card-head .facts { color: light-dark(#565b66, #a3abb6); }
pre.literal { white-space: pre-wrap; overflow-wrap: anywhere; background: light-dark(#f4f5f7, #1d232d);
  color: light-dark(#262730, #e6edf3); border-radius: .3rem; padding: .4rem .5rem; margin: 0 0 .3rem;
  font-size: .82rem; }
pre.literal.answer { font-weight: 600; background: light-dark(#eef1f5, #222b38); }
pre.literal.command { user-select: all; margin: 0; }
.token { display: inline-block; background: light-dark(#e3e0f5, #41358c); color: light-dark(#41358c, #e3e0f5);
  border-radius: .6rem; padding: 0 .4rem; font-size: .72rem; font-weight: 600; }
.plain-table a, .group a { color: light-dark(#1f5fa8, #79b8ff); }
.plain-table { overflow: auto; max-height: 40rem; background: /* a shade where the table goes on */
  linear-gradient(90deg, light-dark(#fff, #0e1117) 40%, transparent) left / 2.5rem 100% no-repeat local,
  linear-gradient(270deg, light-dark(#fff, #0e1117) 40%, transparent) right / 2.5rem 100% no-repeat local,
  linear-gradient(90deg, light-dark(#0004, #fff5), transparent) left / .9rem 100% no-repeat,
  linear-gradient(270deg, light-dark(#0004, #fff5), transparent) right / .9rem 100% no-repeat; }
.plain-table table { border-collapse: collapse; font-size: .875rem; color: light-dark(#262730, #e6edf3); }
.plain-table caption { text-align: left; font-weight: 600; padding: .3rem 0; }
.plain-table th, .plain-table td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0;
  border-bottom: 1px solid light-dark(#e3e5e9, #30363d); overflow-wrap: break-word;
  font-variant-numeric: tabular-nums; }
.plain-table th { color: light-dark(#565b66, #a3abb6); font-weight: 600; }
.plain-table thead th { position: sticky; top: 0; background: light-dark(#fff, #0e1117); }
</style>"""


def show(cards: Iterable[Markup]) -> None:
    """Show cards below each other."""
    st.html(Markup("").join([Markup(_STYLE), *cards]))


def show_text(text: str, kind: str = "") -> None:
    """Show a text literally, with wrapped lines. `kind`: "command" to select the whole text with a click.

    Streamlit's own `st.code` loads 1.5 MB of syntax highlighting.
    """
    show([Markup('<pre class="literal {}">{}</pre>').format(kind, visible(text))])


def tokens_marked(text: str | None) -> Markup:
    """The escaped text with its special tokens (`<|im_end|>`) as badges."""
    parts = _TOKEN.split(_LAST_TOKEN.sub(r" \1", visible(text or "")))
    badge = Markup('<span class="token" title="special token">{}</span>')
    # `split` with one group alternates: text, name of a token, text, ...
    return Markup("").join(badge.format(part) if place % 2 else escape(part) for place, part in enumerate(parts))


def literal(text: str | None, kind: str = "", title: str = "text") -> Markup:
    """A block of literal text; `kind`: "answer" for emphasis. A long one is folded under its title."""
    block = Markup('<pre class="literal {}">{}</pre>').format(kind, tokens_marked(text))
    if len(text or "") <= LONGEST_OPEN:
        return block
    return Markup("<details><summary>{} ({:,} characters)</summary>{}</details>").format(title, len(text or ""), block)


def card(right: bool | None, verdict: str, facts: Iterable[str], blocks: Iterable[Markup]) -> Markup:
    """A card with one answer. `right` None: not graded."""
    kind, sign = SIGNS[right]
    head = Markup('<p><span class="sign">{} {}</span> <span class="facts">{}</span></p>')
    return Markup('<article class="{}">{}{}</article>').format(
        kind, head.format(sign, verdict, " · ".join(facts)), Markup("").join(blocks)
    )


def group(facts: Iterable[str], prompt: str | None, answers: Iterable[Markup]) -> Markup:
    """A prompt with its answers side by side."""
    head = Markup('<div class="card-head"><p class="facts">{}</p>{}</div>')
    below = Markup('<div class="cards">{}</div>').format(Markup("").join(answers))
    about = head.format(Markup(" · ").join(facts), literal(prompt, title="prompt"))
    return Markup('<section class="group">{}{}</section>').format(about, below)


def reply_blocks(text: str, thinks: bool = True) -> list[Markup]:
    """Blocks of reasoning and answer of a completion; one block if it has no thinking, or if that does not end."""
    if not thinks:
        return [literal(text, title="text")]
    reasoning, answer = split_thinking(text)
    if reasoning is None:
        return [Markup('<p class="facts">its thinking does not end</p>'), literal(answer, title="reasoning")]
    return ([literal(reasoning, title="reasoning")] if reasoning else []) + [literal(answer, "answer")]


def same_answer(text: str, reference: str) -> bool:
    """Whether two completions have the same answer, ignoring special tokens and white space."""
    answers = [" ".join(_TOKEN.sub(" ", split_thinking(part)[1]).split()) for part in (text, reference)]
    return answers[0] == answers[1]


def number(fields: Mapping[str, Any], name: str) -> float | None:
    """The field as a number; None if it is missing or not a number."""
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def table(columns: Iterable[str], rows: Iterable[Iterable[object]], caption: str = "") -> Markup:
    """A table whose cells wrap and are never cut. Cells of type Markup are inserted unchanged, all others escaped."""
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(column) for column in columns)
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(cell) for cell in row))
        for row in rows
    )
    title = Markup("<caption>{}</caption>").format(caption) if caption else ""
    # A large table scrolls inside its container; the tabindex allows scrolling by keyboard.
    template = (
        '<div class="plain-table" tabindex="0"><table>{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    )
    return Markup(template).format(title, head, body)


def link(address: str, text: str) -> Markup:
    """A link to another page, opened in the same window."""
    return Markup('<a href="{}" target="_self">{}</a>').format(address, text)
