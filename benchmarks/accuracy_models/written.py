"""Pictures of words: lines and pages in the fonts that come with matplotlib, on grounds of many kinds."""

import re
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from sklearn.datasets import load_sample_images

from accuracy_models.texts import english_paragraphs

SEEN = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "DejaVuSansMono-Bold", "cmr10")
UNSEEN = ("DejaVuSans-Oblique", "DejaVuSerif-Bold", "STIXGeneralItalic", "DejaVuSansMono", "cmss10")


@cache
def words(*, held_out: bool) -> tuple[str, ...]:
    """Words of Python's language reference; a third of them is held out, by their checksums."""
    found = {word for text in english_paragraphs() for word in re.findall(r"[A-Za-z]{2,12}", text)}
    return tuple(sorted(word for word in found if (zlib.crc32(word.encode()) % 3 == 0) == held_out))


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), size)


@cache
def _photographs(*, held_out: bool) -> Image.Image:
    return Image.fromarray(load_sample_images().images[int(held_out)])


def _ground(
    width: int, height: int, random: np.random.Generator, *, held_out: bool
) -> tuple[Image.Image, bool]:
    """A ground that is flat, shaded, noisy or a photograph, and whether it is light."""
    light = bool(random.random() < 0.7)
    base = random.uniform(170, 255, 3) if light else random.uniform(0, 80, 3)
    pixels = np.broadcast_to(base, (height, width, 3)).copy()
    kind = random.integers(4)
    if kind == 1:
        pixels += np.linspace(-40, 40, width)[None, :, None] * random.choice([-1, 1])
    elif kind == 2:
        pixels += random.normal(0, random.uniform(5, 20), pixels.shape)
    elif kind == 3:
        photograph = _photographs(held_out=held_out)
        left = int(random.integers(photograph.width - width)) if photograph.width > width else 0
        top = int(random.integers(photograph.height - height)) if photograph.height > height else 0
        crop = photograph.crop((left, top, left + width, top + height))
        pixels += (np.asarray(crop, dtype=float) - 128) * 0.35
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), light


def _ink(random: np.random.Generator, *, light: bool) -> tuple[int, ...]:
    ink = random.uniform(0, 90, 3) if light else random.uniform(170, 255, 3)
    return tuple(int(one) for one in ink)


def _array(image: Image.Image, random: np.random.Generator) -> np.ndarray:
    """(3, H, W) in [-1, 1], float32, somewhat blurred."""
    image = image.filter(ImageFilter.GaussianBlur(float(random.uniform(0, 0.8))))
    return np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1


def lines(count: int, seed: int, *, held_out: bool, width: int = 320, height: int = 48) -> np.ndarray:
    """(count, 3, height, width): as many words as fit, a little askew."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        image, light = _ground(width, height, random, held_out=held_out)
        name = str(random.choice(UNSEEN if held_out else SEEN))
        font, text = _font(name, int(random.integers(22, 36))), ""
        for word in random.choice(words(held_out=held_out), 4):
            longer = f"{text} {word}".strip()
            if font.getlength(longer) > width - 16:
                break
            text = longer
        _, top, _, bottom = font.getbbox(text)
        layer = Image.new("L", image.size)
        place = (int(random.integers(4, 12)), (height - bottom - top) // 2 + int(random.integers(-2, 3)))
        ImageDraw.Draw(layer).text(place, text, fill=255, font=font)
        layer = layer.rotate(float(random.uniform(-1.5, 1.5)), Image.Resampling.BILINEAR)
        image.paste(Image.new("RGB", image.size, _ink(random, light=light)), mask=layer)
        found.append(_array(image, random))
    return np.stack(found)


def pages(count: int, seed: int, *, held_out: bool, size: int = 320) -> np.ndarray:
    """(count, 3, size, size): a few words each, at several sizes."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        image, light = _ground(size, size, random, held_out=held_out)
        top = int(random.integers(5, 40))
        while True:
            name = str(random.choice(UNSEEN if held_out else SEEN))
            font = _font(name, int(random.integers(14, 40)))
            text = " ".join(random.choice(words(held_out=held_out), int(random.integers(1, 4))))
            bottom = top + int(font.getbbox(text)[3])
            if bottom > size:
                break
            left = int(random.integers(4, size // 2))
            ImageDraw.Draw(image).text((left, top), text, fill=_ink(random, light=light), font=font)
            top = bottom + int(random.integers(6, 50))
        found.append(_array(image, random))
    return np.stack(found)
