"""Images are read as viewers show them, from files, data URLs, animations, folders of frames and requests alike."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from autotune.serve.requests import read_images
from autotune.workloads.pixels import load_image, load_video

RNG = np.random.default_rng(0)
PHOTO = Image.fromarray(RNG.integers(0, 256, (30, 20, 3), np.uint8))
INK = Image.fromarray(
    np.dstack([np.zeros((8, 8, 3), np.uint8), np.repeat(np.arange(0, 256, 32, dtype=np.uint8)[None], 8, axis=0)])
)
"""Black ink that becomes opaque from left to right."""


def on_white(image: Image.Image) -> Image.Image:
    page = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(page, image.convert("RGBA")).convert("RGB")


def from_request(path: Path) -> Image.Image:
    kind = {".png": "png", ".jpg": "jpeg", ".webp": "webp", ".gif": "gif"}[path.suffix]
    (image,) = read_images([f"data:image/{kind};base64," + base64.b64encode(path.read_bytes()).decode()])
    return image


def from_data_url(path: Path) -> Image.Image:
    return load_image("data:image/png;base64," + base64.b64encode(path.read_bytes()).decode())


def from_frames(path: Path) -> Image.Image:
    folder = path.parent / "frames"
    folder.mkdir()
    path.rename(folder / path.name)
    return Image.fromarray(load_video(folder, 1.0).frames[0])


def from_animation(path: Path) -> Image.Image:
    return Image.fromarray(load_video(path, 1.0).frames[0])


WAYS = (load_image, from_data_url, from_frames, from_request, from_animation)


@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_upright(read: Callable[[Path], Image.Image], orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "photo.png"
    PHOTO.save(path, exif=exif)
    with Image.open(path) as image:
        expected = np.asarray(ImageOps.exif_transpose(image))
    np.testing.assert_array_equal(np.asarray(read(path)), expected)


@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize("form", ["RGBA", "LA", "WebP", "palette", "colour of RGB", "level of grey"])
def test_transparent_pages_are_white(read: Callable[[Path], Image.Image], form: str, tmp_path: Path) -> None:
    path = tmp_path / ("ink.webp" if form == "WebP" else "ink.png")
    clear = Image.new("RGB", (8, 8), (10, 20, 30))
    clear.paste((200, 0, 0), (0, 0, 4, 8))
    if form == "WebP":
        INK.save(path, lossless=True, exact=True)
    elif form == "palette":
        clear.convert("P", palette=Image.Palette.ADAPTIVE).save(path, transparency=0)
    elif form == "colour of RGB":
        clear.save(path, transparency=(10, 20, 30))
    elif form == "level of grey":
        clear.convert("L").save(path, transparency=clear.convert("L").getpixel((7, 0)))
    else:
        INK.convert(form).save(path)
    with Image.open(path) as image:
        expected = np.asarray(on_white(image))
    assert expected.max() == 255
    np.testing.assert_array_equal(np.asarray(read(path)), expected)


@pytest.mark.parametrize("levels", [np.uint16, np.int32, np.float32])
def test_depths_above_eight_bits_are_scaled(levels: type, tmp_path: Path) -> None:
    """Pillow's own conversion cuts levels off at 255, which makes nearly all of them white."""
    ramp = np.linspace(0, 65535, 256).round().reshape(16, 16)
    path = tmp_path / "ramp.tiff"
    Image.fromarray((ramp / 65535 if levels is np.float32 else ramp).astype(levels)).save(path)
    shown = np.asarray(load_image(path))[:, :, 1]
    np.testing.assert_array_equal(shown.ravel(), np.arange(256))


def test_a_transparent_level_of_sixteen_bits_is_white(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 30000]], np.uint16))
    image.save(tmp_path / "grey.png", transparency=0)
    assert np.asarray(load_image(tmp_path / "grey.png"))[0, :, 0].tolist() == [255, 117]


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "CMYK", "YCbCr"])
def test_other_modes_are_pillows_own_conversion(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "photo.tiff"
    PHOTO.convert(mode).save(path)
    with Image.open(path) as image:
        np.testing.assert_array_equal(np.asarray(load_image(path)), np.asarray(image.convert("RGB")))
