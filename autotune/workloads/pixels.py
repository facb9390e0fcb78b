"""Images and videos of prompts."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autotune.errors import UserError, reading
from autotune.workloads.hub import local_file

if TYPE_CHECKING:
    from PIL.Image import Image

UNTIMED_FRAME_S = 0.1  # how long browsers show a frame whose duration is missing or 0


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of a video, [frames, height, width, 3] as RGB, of which ``fps`` were shown in a second."""

    frames: NDArray[np.uint8]
    fps: float


def as_shown(image: Image) -> Image:
    """An opened image, or a frame of one, as viewers show it, in RGB: upright by its EXIF orientation, on a white page
    where it is transparent, and with levels of more than 8 bits scaled to 8.
    """
    from PIL import Image as PILImage
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = PILImage.fromarray(_eight_bits(image))
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    page = PILImage.new("RGBA", image.size, "white")
    page.alpha_composite(image)
    return page.convert("RGB")


def _eight_bits(image: Image) -> NDArray[np.uint8]:
    """Levels of grey [height, width] of an image with more than 8 bits, which Pillow would cut off at 255."""
    levels = np.asarray(image).astype(np.float64)
    transparent = levels == image.info.get("transparency")
    largest = next((top for top in (1.0, 255.0, 65535.0) if levels.max() <= top), levels.max())
    if image.mode != "F":
        largest = max(largest, 65535.0)
    grey = np.round(levels.clip(0) * (255 / largest)).astype(np.uint8)
    return np.where(transparent, np.uint8(255), grey)


def load_image(address: str | Path) -> Image:
    """The image in a file, or in a data URL, as ``as_shown`` gives it.

    Raises:
        UserError: missing file, or not an image that PIL can read.
    """
    from PIL import Image as PILImage

    is_file = not str(address).startswith("data:")
    name = local_file(address) if is_file else f"{address!s:.40}..."
    with reading(f"{name}: not a readable image", "give a PNG or JPEG file"):
        data = str(address).partition(";base64,")[2]
        with PILImage.open(name if is_file else io.BytesIO(base64.b64decode(data, validate=True))) as image:
            return as_shown(image)


def png_url(image: Image) -> str:
    """A data URL of an image as a PNG, which keeps every pixel; ``load_image`` reads it."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def load_video(address: str | Path, fps: float) -> Video:
    """The frames of a video, ``fps`` of each second.

    A folder holds the frames themselves, as images in the order of their names. The frames of an animated GIF, WebP or
    PNG file are those shown at 0, 1 / fps, ... seconds, and so are those of other files, which PyAV decodes.

    Raises:
        UserError: no such file or folder, no frame in it, frames of several sizes, or a file that cannot be decoded.
    """
    path = local_file(address)
    if path.is_dir():
        frames = [np.asarray(load_image(file)) for file in sorted(path.iterdir()) if not file.name.startswith(".")]
    else:
        frames = []
        for end_s, frame in _shown(path):
            while len(frames) / fps < end_s - 1e-6:  # durations are sums of rounded ones
                frames.append(frame)
    sizes = sorted({frame.shape[:2] for frame in frames})
    if len(sizes) != 1:
        shown = "none" if not sizes else " and ".join(f"{width} x {height}" for height, width in sizes[:2])
        raise UserError(f"{path}: a video needs frames, all of one size; got {shown}; give other frames")
    return Video(np.stack(frames), fps)


def _shown(path: Path) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """The frames of a file, each with the second at which the next one replaces it."""
    from PIL import Image as PILImage
    from PIL import ImageSequence, UnidentifiedImageError

    end_s = 0.0
    with reading(f"{path}: not a readable animation", "check the path, or save it again"):
        try:
            image = PILImage.open(path)
        except UnidentifiedImageError:
            yield from _decoded(path)
            return
        with image:
            for frame in ImageSequence.Iterator(image):
                shown = np.asarray(as_shown(frame))  # a WebP frame has its duration once it is read
                end_s += frame.info.get("duration", 0) / 1000 or UNTIMED_FRAME_S
                yield end_s, shown


def _decoded(path: Path) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """As ``_shown``, of a file that PIL cannot read."""
    try:
        import av
    except ImportError:
        raise UserError(
            f"{path}: videos that are no GIF, WebP or PNG animation need PyAV; pip install 'autotune-speculative[video]', or give a folder with the frames"
        ) from None
    with reading(f"{path}: not a readable video", "give a folder with the frames"), av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate)
        for number, frame in enumerate(container.decode(video=0), start=1):
            quarter_turns = getattr(frame, "rotation", 0) // 90  # how a phone was held
            yield number / rate, np.rot90(frame.to_ndarray(format="rgb24"), quarter_turns)
