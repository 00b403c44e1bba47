"""What train leaves in a run's folder, read for scripts/plot.py and scripts/compare.py. A run may still be going on."""
import json
import math
import pathlib


class Unreadable(Exception):
    """One line that names the run and says what is wrong with it."""


class Run:
    """name: as it was given; config: {"section.key": text}; epochs: metrics.jsonl's objects; test: test.json's, None before the end."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.name = str(folder).rstrip("/")
        if not self.folder.is_dir():
            raise Unreadable(f"{self.name}: {'not a folder' if self.folder.exists() else 'no such folder'}")
        self.config = parse_config(self._text("config.yaml", None))
        # The line that is being written just now has no end yet.
        lines = self._text("metrics.jsonl", "").split("\n")[:-1]
        self.epochs = [self._object("metrics.jsonl", line, ("epoch", "train_loss", "val_mse", "seconds")) for line in lines]
        test = self._text("test.json", "")
        self.test = self._object("test.json", test, ("epoch", "mse", "mae", "repeat_last")) if test else None
        if self.test and self._went_on():
            self.test = None

    def _text(self, name, default):
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            if default is not None:
                return default
            raise Unreadable(f"{self.name}: no {name}: not the folder of a run") from None
        except (OSError, UnicodeDecodeError) as error:
            raise Unreadable(f"{self.name}: {name}: {getattr(error, 'strerror', None) or 'not text'}") from None

    def _object(self, name, text, keys):
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, dict) or any(key not in value for key in keys):
            raise Unreadable(f"{self.name}: {name}: not what train writes")
        return value

    def _went_on(self):
        """Whether the run was resumed after its test and has found better weights since, so that test.json is of others."""
        tested = [self.monitored(e) for e in self.epochs if e["epoch"] == self.test["epoch"]]
        return bool(tested) and any(e["epoch"] > self.test["epoch"] and number(self.monitored(e)) < number(tested[-1])
                                    for e in self.epochs)

    def monitored(self, epoch):
        """What train chose the best epoch by, as train.monitor says; runs of versions without that key by validation MSE."""
        key = {"loss": "val_loss", "mae": "val_mae"}.get(self.config.get("train.monitor"), "val_mse")
        return epoch[key] if key in epoch else epoch["val_mse"]

    def best(self):
        """The epoch whose weights are, or would be, tested; None before the first with a finite validation error."""
        if self.test:
            return next((e for e in self.epochs if e["epoch"] == self.test["epoch"]), None)
        finite = [e for e in self.epochs if self.monitored(e) is not None]
        return min(finite, key=self.monitored, default=None)

    def masked(self):
        """Whether it was pre-trained, so that its errors are not of forecasts."""
        return self.config.get("train.objective") == "masked"


def number(value):
    """null, which stands for what is not finite, as a number that is never the least."""
    return math.inf if value is None else value


def parse_config(text):
    """The resolved config, whose values are all on one line."""
    keys, section = {}, ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if line and not line.startswith(" "):
            section = key
        elif line.strip():
            keys[f"{section}.{key.strip()}"] = value.strip()
    return keys
