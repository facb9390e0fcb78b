"""Loads the models that people name by their ids, from the stand-in of the Hub in the tests, and writes docs/models.md.

The table says which ids load, whether the tokens of a prompt are those of transformers, and whether the answer is that
of ``generate``. Takes about five minutes for all ids.

python benchmarks/public_models.py             # all ids
python benchmarks/public_models.py OWNER/NAME  # one row, which is printed
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import click

BEGIN, END = "<!-- table: public models -->", "<!-- /table -->"
PAGE = Path("docs/models.md")
QUESTION = "Why is the sky blue?"
NEW_TOKENS = 24


class Row(NamedTuple):
    """A line of the table."""

    id: str
    model_type: str
    config: str
    template: str
    context: str
    heads: str
    result: str


def examine(name: str) -> Row:
    """Load a model by its id, and compare its prompt and its answer with transformers' own."""
    from autotune.errors import UserError
    from autotune.modeling.loading import load_model, load_processor, resolve
    from autotune.runtime.decoder import Decoder
    from tests.hub import published

    config: dict[str, Any] = published.config_of(name) if name in published.IDS else {}
    source = "" if not config else "defaults of its class" if name in published.CLASS_DEFAULTS else "published"
    text = config.get("text_config") or config
    heads = "`:mtp`" if text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") else ""
    kind = str(config.get("model_type", ""))
    template, context = "", ""
    try:
        resolve(name)
        model = load_model(name)
        processor = load_processor(name)
        template = compare_prompts(name, processor)
        tree = {"policy": "eagle2", "depth": 4, "k": 4, "budget": 16}
        try:
            decoder = Decoder(model, "retrieval", tree=tree, processor=processor)
        except UserError as error:
            if "choose the policy chain" not in str(error):
                raise
            decoder = Decoder(model, "retrieval", tree={"policy": "chain"}, processor=processor)
        context = f"{decoder.target.max_context:,}"
        inputs = prompt_of(name, processor).inputs(processor)
        expected = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        found = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS, temperature=0.0).sequences
        result = "same tokens" if found.tolist() == expected.tolist() else "**other tokens**"
    except UserError as error:
        reason = re.sub(r"\S*/snapshots/\w+/?", "", str(error).removeprefix(f"{name}: "))
        result = f"refused: {reason.partition('; known:')[0]}".replace("|", "\\|")
    return Row(name, kind, source, template, context, heads, result)


def prompt_of(name: str, processor: Any) -> Any:
    from autotune.workloads.prompt import Prompt, WorkloadPrompt

    images = has_images(processor)
    return WorkloadPrompt(name, Prompt(prompt=QUESTION, images=["picture"] * len(images)), tuple(images))


def has_images(processor: Any) -> list[Any]:
    """A picture for a processor that reads images."""
    from PIL import Image

    if getattr(processor, "image_processor", None) is None:
        return []
    return [Image.radial_gradient("L").resize((40, 30)).convert("RGB")]


def compare_prompts(name: str, processor: Any) -> str:
    """Whether the ids of a prompt are those of ``apply_chat_template``."""
    if not getattr(processor, "chat_template", None):
        return "none"
    images = has_images(processor)
    content: Any = QUESTION
    if images:
        content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": QUESTION}]
    chat = [{"role": "user", "content": content}]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    expected = processor.apply_chat_template(chat, **options)["input_ids"]
    found = prompt_of(name, processor).inputs(processor)["input_ids"]
    return "same ids" if found.tolist() == expected.tolist() else "**other ids**"


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    heads = ("model", "type", "config", "prompt", "context", "own heads", "decoded")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| `{row.id}` | {' | '.join(row[1:])} |" for row in rows]
    return "\n".join(lines)


def write_table(rows: list[Row]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}")


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    os.environ.pop("HF_HUB_OFFLINE", None)
    os.environ["HF_HUB_ETAG_TIMEOUT"] = "120"  # a repository is written when it is first asked for
    from tests.hub import repositories
    from tests.hub.server import Hub, serving

    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(repositories.Folders(Path(folder)), {repositories.GATED}, dict(repositories.RENAMED))
        with serving(hub):
            from huggingface_hub import constants

            constants.ENDPOINT = hub.url
            constants.HUGGINGFACE_CO_URL_TEMPLATE = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
            constants.HF_HUB_CACHE = str(Path(folder) / "cache")
            from transformers.utils import logging

            logging.set_verbosity_error()
            logging.disable_progress_bar()
            warnings.filterwarnings("ignore")
            rows = []
            for name in names or sorted([*hub.folders, *hub.renamed]):
                rows.append(examine(name))
                print(" | ".join(rows[-1]), flush=True)
    if not names:
        write_table(rows)


if __name__ == "__main__":
    main()
