"""A profile as others get it without paths of this machine, its draft, and a card that describes it."""

from __future__ import annotations

import re
from pathlib import Path

from autotune.documents.answer import answer_of
from autotune.documents.decoding_profile import DecodingProfile
from autotune.errors import UserError
from autotune.modeling.hub import PROFILE, cached_models
from autotune.modeling.loading import bundled_models

LLAMA_OPTIONS = {'"-m"': '"-hf"', '"--spec-draft-model"': '"--spec-draft-hf"'}
"""Options of llama-server that take a model of the Hub, by those that take its file, as JSON."""
NAMES = re.compile(r'(?<="id":")[^"]+|(?<=")/[^"\\]+')
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
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template("card.md")
    card = template.render(
        profile=profile, name=name, license=license, answer=answer_of(profile, Path(name)), bundled=bundled_models()
    )
    paths = (source.parent / draft.id).rglob("*") if (draft := profile.point.draft) is not None else ()
    beside = {
        path.relative_to(source.parent).as_posix(): path
        for path in paths
        if path.is_file() and ".checkpoint" not in path.parts
    }
    return {PROFILE: f"{profile.dump()}\n".encode(), "README.md": card.encode(), **beside}


def shared_profile(profile: DecodingProfile, source: Path) -> DecodingProfile:
    """The profile as others can load it: with ids in place of paths in the Hub's cache, and without other paths.

    Args:
        source: the file of the profile, beside which the folder of its draft may lie.

    Raises:
        UserError: a model is a file or a folder of this machine.
    """
    cached, deployment, draft = cached_models().items(), profile.point.deployment, profile.point.draft
    names = {
        **{str(file.resolve()): f"{id}:{file.stem}" for id, folder in cached for file in folder.glob("*.gguf")},
        **{str(folder.resolve()): id for id, folder in cached},
        **{path: Path(path).name for path in (profile.workload.name, *(deployment.command[:1] if deployment else ()))},
        **LLAMA_OPTIONS,
    }
    paths = re.compile("|".join(map(re.escape, names)))
    shared = DecodingProfile.model_validate_json(paths.sub(lambda path: names[path[0]], profile.model_dump_json()))
    for name in NAMES.findall(shared.model_dump_json(exclude={"evidence"})):
        model = Path(name.partition(":")[0])
        is_here = model.exists() or (source.parent / model).exists()
        is_draft = draft is not None and name == draft.id and (source.parent / model).is_dir()
        if model.is_absolute() or ".." in model.parts or (is_here and not is_draft):
            raise UserError(
                f"{source}: it names {name}, which is on this machine alone; push that model (hf upload OWNER/NAME {model}) and "
                "give its id to the search, or put the folder of a draft beside the profile"
            )
    return shared
