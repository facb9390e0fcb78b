"""What others get of a profile: the profile without paths of this machine, its draft, and a card that describes it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from autotune.documents.answer import answer_of
from autotune.documents.decoding_profile import DecodingProfile
from autotune.errors import UserError
from autotune.modeling.hub import PROFILE, cached_models, is_id

LLAMA_OPTIONS = {'"-m"': '"-hf"', '"--spec-draft-model"': '"--spec-draft-hf"'}
"""Options of llama-server that take a model of the Hub, by those that take its file."""
NAMES = re.compile(r'(?<="id": ")[^"]+|(?<=")/[^"\\]+')
"""Names of models, and absolute paths, in the JSON of a profile."""


def shared_files(source: Path, name: str, license: str) -> dict[str, bytes | Path]:
    """The files of a profile's repository: the profile, a card, and the files of a draft whose folder lies beside it.

    Args:
        source: the file of the profile.
        name: of the repository, for the commands of the card.

    Raises:
        UserError: as ``shared_profile``, or the file is no profile.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    profile = shared_profile(DecodingProfile.load(source), source)
    options = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=FileSystemLoader(Path(__file__).parent), **options).get_template("card.md")
    answer = " ".join(answer_of(profile, Path(name))[:-1])  # without the next command
    card = template.render(profile=profile, name=name, license=license, answer=answer, is_id=is_id)
    folders = [] if profile.point.draft is None else [source.parent / profile.point.draft.id]
    names = [path.relative_to(source.parent) for folder in folders for path in folder.rglob("*") if path.is_file()]
    draft = {path.as_posix(): source.parent / path for path in names if "/." not in f"/{path.as_posix()}"}
    return {PROFILE: f"{profile.dump()}\n".encode(), "README.md": card.encode(), **draft}


def shared_profile(profile: DecodingProfile, source: Path) -> DecodingProfile:
    """The profile as others can load it: with ids in place of paths in the Hub's cache, and without other paths.

    Args:
        source: the file of the profile, beside which the folder of its draft may lie.

    Raises:
        UserError: a model is a file or a folder of this machine.
    """
    cached, deployment, draft = cached_models().items(), profile.point.deployment, profile.point.draft
    files = [profile.workload.name, *(deployment.command[:1] if deployment is not None else ())]
    names = {
        **{str(file.resolve()): f"{id}:{file.stem}" for id, folder in cached for file in folder.glob("*.gguf")},
        **{str(folder.resolve()): id for id, folder in cached},
        **{file: Path(file).name for file in files},
        **LLAMA_OPTIONS,
    }
    content = profile.dump()
    for path, name in names.items():
        content = content.replace(path, name)
    shared = DecodingProfile.parse(json.loads(content), source=source)
    for name in NAMES.findall(json.dumps(shared.model_dump(mode="json", exclude={"evidence"}))):
        model = Path(name.partition(":")[0])
        is_beside = (
            draft is not None and name == draft.id and ".." not in model.parts and (source.parent / model).is_dir()
        )
        if model.is_absolute() or (model.exists() and not is_beside):
            raise UserError(
                f"{source}: it names {name}, which is on this machine alone; push that model (hf upload OWNER/NAME {model}) and "
                "give its id to the search, or put the folder of a draft beside the profile"
            )
    return shared
