"""Pictures and sounds of an HTML page, each in the page once, however often they are shown.

A picture is a CSS rule. A sound has a player where it is shown first, and its waveform only where it is shown again.
"""

import base64
import binascii
import hashlib

from confed.report.html.media import Recording

_PNG = b"\x89PNG\r\n\x1a\n"


class ImageStore:
    """Pictures and sounds of a page, each stored once.

    Attributes:
        css: rules of the pictures added so far.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._rules: list[str] = []
        self._heard: set[str] = set()

    @property
    def css(self) -> str:
        """Rules of the pictures added so far."""
        return "\n".join(self._rules)

    def add(self, image: object) -> str:
        """The CSS class of a picture, empty if it is no base64 PNG."""
        if not isinstance(image, str):
            return ""
        if image not in self._names:
            try:
                content = base64.b64decode(image, validate=True)
            except (binascii.Error, ValueError):
                return ""
            if not content.startswith(_PNG):
                return ""
            name = "g" + hashlib.sha256(content).hexdigest()[:12]
            self._names[image] = name
            self._rules.append(f".{name}{{background-image:url(data:image/png;base64,{image})}}")
        return self._names[image]

    def first(self, recording: Recording) -> bool:
        """Whether a recording was not asked about before: then it is put into the page."""
        heard_before = recording.text in self._heard
        self._heard.add(recording.text)
        return not heard_before
