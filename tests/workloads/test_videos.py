"""Videos in workloads: which frames are read, what the processor gets of them, and a search over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from autotune.errors import UserError
from autotune.runtime.decoder import Decoder
from autotune.workloads.pixels import load_video
from autotune.workloads.workload import load_workload
from tests.families import FAMILIES, random_picture
from tests.runtime.test_families import Member, new_member
from tests.sample_documents import write_image, write_workload

# The part of Qwen2.5-VL's template that places images and videos.
TEMPLATE = """{% for message in messages %}{{ message.role }}: {% for part in message.content %}{% if part.type == 'text' %}\
{{ part.text }}{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %} {% endfor %}assistant: """
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Member:
    member = new_member(FAMILIES["qwen2_5_vl"], tmp_path_factory.mktemp("qwen"))
    member.processor.chat_template = TEMPLATE
    for name in ("target", "draft"):
        member.processor.save_pretrained(member.folder / name)
    return member


def write_animation(path: Path, colours: Any = COLOURS, *, ms: int = 500) -> str:
    frames = [Image.new("RGB", (24, 16), colour) for colour in colours]
    options = {"lossless": True} if path.suffix == ".webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=ms, **options)
    return path.name


def write_frames(folder: Path, num_frames: int, seed: int) -> str:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for number in range(num_frames):
        random_picture(rng, (24, 16)).save(folder / f"{number:03}.png")
    return folder.name


def colours(path: Path, fps: float) -> list[tuple[int, ...]]:
    video = load_video(path, fps)
    assert video.fps == fps and video.frames.shape[1:] == (16, 24, 3) and video.frames.dtype == np.uint8
    return [tuple(frame[8, 12].tolist()) for frame in video.frames]


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_animations_are_read_at_a_rate(suffix: str, tmp_path: Path) -> None:
    """The frames shown at 0, 1 / fps, ... seconds; the animation ends after 2 seconds."""
    path = tmp_path / f"a.{suffix}"
    write_animation(path)
    assert colours(path, 2.0) == COLOURS
    assert colours(path, 1.0) == COLOURS[::2]
    assert colours(path, 0.1) == COLOURS[:1]
    assert colours(path, 4.0) == [colour for colour in COLOURS for _ in range(2)]


def test_a_folder_holds_the_frames(tmp_path: Path) -> None:
    folder = tmp_path / "frames"
    folder.mkdir()
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", (24, 16), colour).save(folder / f"{number}.jpg" if number == 9 else folder / f"{number}.png")
    (folder / ".hidden").write_text("no frame")
    assert colours(folder, 0.5) == COLOURS


def test_other_files_are_decoded_by_pyav(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 24, 16, "yuv420p"
        for colour in [colour for colour in COLOURS for _ in range(2)]:
            frame = av.VideoFrame.from_image(Image.new("RGB", (24, 16), colour))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert np.abs(np.subtract(colours(path, 2.0), COLOURS)).max() < 32, "the codec loses a little"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"a\.mp4: not a readable video .*; give a folder with the frames"):
        load_video(path, 2.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.gif", r"nowhere\.gif: not a readable animation .*No such file"),
        ("empty", "a video needs frames, all of one size; got none; give other frames"),
        ("mixed", "a video needs frames, all of one size; got 32 x 32 and 40 x 40"),
        ("text", r"text.notes\.txt: not a readable image"),
        ("cut.gif", r"cut\.gif: not a readable (animation|video)"),
    ],
)
def test_unreadable_video(name: str, message: str, tmp_path: Path) -> None:
    for folder in ("empty", "mixed", "text"):
        (tmp_path / folder).mkdir()
    for size in (32, 40):
        Image.new("RGB", (size, size)).save(tmp_path / "mixed" / f"{size}.png")
    (tmp_path / "text" / "notes.txt").write_text("no image")
    write_animation(tmp_path / "cut.gif")
    (tmp_path / "cut.gif").write_bytes((tmp_path / "cut.gif").read_bytes()[:-40])
    path = write_workload(tmp_path, [{"prompt": "x", "videos": [name]}])
    with pytest.raises(UserError, match=message) as error:
        load_workload(str(path), "tune")
    assert "\n" not in str(error.value)


def test_other_files_without_pyav(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(b"a video")
    with pytest.raises(
        UserError,
        match=r"a\.mp4: videos that are no GIF.* need PyAV; pip install 'autotune-speculative\[video\]', or give",
    ):
        load_video(tmp_path / "a.mp4", 2.0)


def test_prompts_with_videos(qwen: Member, tmp_path: Path) -> None:
    """The processor gets frames and times; markers are first or where the chat has them; the answer is
    ``generate``'s.
    """
    write_frames(tmp_path / "frames", 5, seed=0)
    write_image(tmp_path / "a.png", 0)
    part = {kind: {"type": kind} for kind in ("image", "video")}
    said = [part["video"], {"type": "text", "text": "A clip."}, part["image"], {"type": "text", "text": "Which?"}]
    lines: list[dict[str, Any]] = [
        {"prompt": "What happens?", "videos": ["frames"], "max_new_tokens": 6},
        {"prompt": "What happens?", "videos": ["frames"], "fps": 0.5},
        {"messages": [{"role": "user", "content": said}], "videos": ["frames"], "images": ["a.png"]},
    ]
    path = str(write_workload(tmp_path, [{**line, "split": "tune"} for line in lines]))
    first, slow, chat = load_workload(path, "tune").prompts
    assert [len(p.pixels) for p in (first, slow, chat)] == [1, 1, 2] and len(chat.images) == len(chat.videos) == 1
    assert len({first.sha256, slow.sha256, chat.sha256}) == 3
    inputs = first.inputs(qwen.processor)
    assert inputs["video_grid_thw"].tolist() == [[3, 4, 6]], (
        "pairs of frames, the last one repeated; patches of 4 pixels"
    )
    token = qwen.target.config.video_token_id
    assert int((inputs["input_ids"] == token).sum()) == 3 * 4 * 6 // 4
    assert [float(p.inputs(qwen.processor)["second_per_grid_ts"][0]) for p in (first, slow)] == [1.0, 4.0]
    text = qwen.processor.decode(chat.inputs(qwen.processor)["input_ids"][0])
    assert text.index("video_pad") < text.index("A clip.") < text.index("image_pad") < text.index("Which?")
    expected: Tensor = qwen.target.generate(**inputs, max_new_tokens=6, do_sample=False)
    found = Decoder(qwen.target).generate(**inputs, **first.settings.generation).sequences
    assert torch.equal(found, expected)
    frames = first.videos[0].frames.copy()
    frames[-1, 0, 0] ^= 1
    assert replace(first, pixels=(replace(first.videos[0], frames=frames),)).sha256 != first.sha256


def test_targets_without_videos(processor: Any, tmp_path: Path) -> None:
    write_animation(tmp_path / "a.gif")
    lines = [{"prompt": "x", "videos": ["a.gif"], "split": "tune"}, {"prompt": "x", "split": "tune"}]
    workload = load_workload(str(write_workload(tmp_path, lines)), "tune")
    with pytest.raises(UserError, match=r"workload\.jsonl:1: the prompt has a video, but the target reads none"):
        workload.prompts[0].inputs(processor)
    assert workload.readable_by(processor).prompts == workload.prompts[1:]
    with pytest.raises(
        UserError, match="the target reads no videos, and every prompt has a video; name another --work"
    ):
        replace(workload, prompts=workload.prompts[:1]).readable_by(processor)
