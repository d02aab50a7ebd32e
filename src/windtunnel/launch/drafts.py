"""How many tokens a step yields with drafts, where the line does not say.

Measured by InferenceX (golden_al_distribution of its repository, August 2026) on SPEED-Bench's coding prompts, with
thinking on, on B300 with vLLM. ``acceptance_length`` counts the token that is always right. How well drafts do depends
on the prompts: give your own.
"""

from typing import NamedTuple


class Measured(NamedTuple):
    """Mean tokens of a step with 1, 2, … drafts."""

    model: str
    """Beginning of the model's name, without organisation, in lower case."""
    method: str
    lengths: tuple[float, ...]


TABLE = (
    Measured("deepseek-v4", "mtp", (1.79, 2.27, 2.49, 2.54, 2.55, 2.55, 2.55, 2.58)),
    Measured("deepseek-v4", "dspark", (1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.77, 3.77)),
    Measured("glm-5", "mtp", (1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06)),
    Measured("kimi-k2", "eagle", (1.83, 2.43, 2.88, 3.24, 3.46, 3.62, 3.71, 3.77)),
    Measured("kimi-k3", "dspark", (1.84, 2.45, 2.87, 3.22, 3.44, 3.54, 3.78, 3.88)),
    Measured("minimax-m3", "eagle", (1.78, 2.38, 2.83, 3.11, 3.35, 3.45, 3.53, 3.74)),
    Measured("qwen3.5", "mtp", (1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21)),
)
USUAL = {"mtp": "deepseek-v4", "eagle": "kimi-k2", "dspark": "kimi-k3"}
"""Method → the model whose lengths stand for those of a model that was not measured."""
KINDS = {"eagle": "eagle", "eagle3": "eagle", "dspark": "dspark", "dflash": "dspark", "draft_model": "eagle"}
"""What a draft is called → its method in the table."""
PREDICTING = ("mtp", "nextn", "next_n")


def method_of(name: str) -> str:
    """The method of the table that comes closest to what a line calls it."""
    plain = name.lower()
    return "mtp" if any(word in plain for word in PREDICTING) else KINDS.get(plain, "eagle")


def usual_acceptance(model: str, name: str, drafts: int) -> tuple[float, str]:
    """(tokens of a step, where that was measured) for a model, a method as the line calls it, and this many drafts."""
    plain, method = model.rsplit("/", 1)[-1].lower(), method_of(name)
    own = [each for each in TABLE if each.method == method and plain.startswith(each.model)]
    found = own or [each for each in TABLE if each.method == method and each.model == USUAL[method]]
    lengths = found[0].lengths
    return min(lengths[min(drafts, len(lengths)) - 1], drafts + 1.0), f"{found[0].model}, {method}"
