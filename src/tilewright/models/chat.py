"""The form of a conversation: what stands around the turns of user and model.

In: a tokenizer and turns. Out: the text of a prompt, whose control tokens are read as such (`special=True`). The form is known by the control tokens that the vocabulary has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.base.errors import UserError
from tilewright.models.tokenizers import Tokenizer


@dataclass(frozen=True)
class ChatForm:
    """`turn` and `reply` have places for a role and a text; `opening` begins the model's turn."""

    name: str
    marker: str
    """The control token by which a vocabulary is known."""
    turn: str
    opening: str
    model: str = "assistant"


FORMS = (
    ChatForm("gemma", "<start_of_turn>", "<start_of_turn>{role}\n{text}<end_of_turn>\n", "<start_of_turn>model\n", "model"),
    ChatForm("chatml", "<|im_start|>", "<|im_start|>{role}\n{text}<|im_end|>\n", "<|im_start|>assistant\n"),
    ChatForm("llama3", "<|start_header_id|>", "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
)


def chat_form(tokenizer: Tokenizer) -> ChatForm:
    """The form that a vocabulary knows."""
    found = next((form for form in FORMS if tokenizer.id_of(form.marker) is not None), None)
    if found is None:
        raise UserError.at("TW005", "the vocabulary has no control tokens of a conversation", help=f"known are {', '.join(f'{f.name} ({f.marker})' for f in FORMS)}; tilewright generate goes on with any text")
    return found


def chat_prompt(tokenizer: Tokenizer, turns: Sequence[tuple[str, str]]) -> str:
    """Turns of ('user' or 'model', text) as the text of a prompt that the model goes on with."""
    form = chat_form(tokenizer)
    return "".join(form.turn.format(role=form.model if role == "model" else role, text=text) for role, text in turns) + form.opening
