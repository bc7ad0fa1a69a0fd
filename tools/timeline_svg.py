#!/usr/bin/env python3
"""Draws the timeline of a pipeline schedule as an SVG picture.

    cadre schedule --name 1f1b --ranks 4 --microbatches 8 --json step.json
    timeline_svg.py step.json step.svg

Without names, or with "-", it reads standard input and writes standard output. The picture has a row for each rank and a
box for each computation with the number of its microbatch. The colour tells the kind, a lighter one a later stage of the
rank. Browsers show the action and its times under the pointer.
"""

import argparse
import json
import math
import sys
import xml.sax.saxutils

# The sizes are in pixels.
LABEL_WIDTH = 70
NOTE_WIDTH = 190
TOP = 56
ROW_HEIGHT = 38
BOX_HEIGHT = 30
LEAST_PLOT_WIDTH = 620
MOST_PLOT_WIDTH = 6000
LEAST_BOX_WIDTH = 20
DIGIT_WIDTH = 7
LEAST_TICK_DISTANCE = 48
LEGEND_HEIGHT = 64

KINDS = {"F": ("forward", (76, 132, 214)), "B": ("backward", (58, 158, 98)),
         "I": ("input gradient", (86, 190, 176)), "W": ("weight gradient", (240, 166, 60))}
FIRST_LIGHTNESS, MOST_LIGHTNESS = 0.15, 0.7


def colour(kind, lightness):
    return "#" + "".join(f"{round(part + (255 - part) * lightness):02x}" for part in KINDS[kind][1])


def milliseconds(ms):
    """Formats a time with at most microseconds, without trailing zeros."""
    return f"{ms:.3f}".rstrip("0").rstrip(".")


def round_step(at_least):
    """Returns a step of the time axis: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least)


def text(x, y, content, attributes=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{xml.sax.saxutils.escape(content)}</text>'


def rect(x, y, width, height, fill, attributes="", tip=""):
    title = f"<title>{xml.sax.saxutils.escape(tip)}</title>" if tip else ""
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" {attributes}>'
            f"{title}</rect>")


class Picture:
    def __init__(self, timeline):
        self.timeline = timeline
        self.ranks = timeline["ranks"]
        self.step_ms = timeline["step_ms"]
        durations = [action["end_ms"] - action["begin_ms"] for rank in self.ranks for action in rank["actions"]
                     if action["computations"]]
        shortest = min((duration for duration in durations if duration > 0), default=self.step_ms)
        self.pixels_per_ms = 0  # none for a step without length, and for one too short for any number
        if self.step_ms > 0:
            wanted = self.step_ms * LEAST_BOX_WIDTH / shortest
            scale = min(max(wanted, LEAST_PLOT_WIDTH), MOST_PLOT_WIDTH) / self.step_ms
            self.pixels_per_ms = scale if math.isfinite(scale) else 0
        self.bottom = TOP + ROW_HEIGHT * len(self.ranks)

    def x_of(self, ms):
        return LABEL_WIDTH + ms * self.pixels_per_ms

    def lightness_of(self, stage):
        """Returns the lightness of a stage, which rises with the number of the stage on its
        rank."""
        num_ranks = len(self.ranks)
        num_passes = (self.timeline["num_stages"] - 1) // num_ranks + 1
        share = stage // num_ranks / max(1, num_passes - 1)
        return FIRST_LIGHTNESS + (MOST_LIGHTNESS - FIRST_LIGHTNESS) * share

    def axis(self):
        if self.pixels_per_ms == 0:
            return
        step = round_step(LEAST_TICK_DISTANCE / self.pixels_per_ms)
        for i in range(int(self.step_ms * (1 + 1e-9) / step) + 1):
            x = self.x_of(i * step)
            yield f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{self.bottom}" stroke="#ccc"/>'
            yield text(x, TOP - 10, milliseconds(i * step) + (" ms" if i == 0 else ""),
                       'text-anchor="middle" fill="#555"')

    def row(self, number, rank):
        y = TOP + ROW_HEIGHT * number + (ROW_HEIGHT - BOX_HEIGHT) / 2
        baseline = y + BOX_HEIGHT / 2 + 4
        end = self.x_of(self.step_ms)
        yield text(LABEL_WIDTH - 10, baseline, f"rank {number}", 'text-anchor="end"')
        yield rect(LABEL_WIDTH, y, end - LABEL_WIDTH, BOX_HEIGHT, "#eee")
        for action in rank["actions"]:
            yield from self.boxes(action, y)
        yield text(end + 12, baseline,
                   f"bubble {rank['bubble_share'] * 100:.1f} %, {rank['live_activations']} live", 'fill="#333"')

    def boxes(self, action, y):
        """Draws a box for each computation; two that run together are drawn one below the other."""
        x = self.x_of(action["begin_ms"])
        width = self.x_of(action["end_ms"]) - x
        tip = f"{action['action']}: {milliseconds(action['begin_ms'])} to {milliseconds(action['end_ms'])} ms"
        for i, part in enumerate(action["computations"]):
            height = BOX_HEIGHT / len(action["computations"])
            top = y + height * i
            yield rect(x, top, width, height, colour(part["kind"], self.lightness_of(part["stage"])),
                       'stroke="white"', tip)
            label = str(part["microbatch"])
            if width >= DIGIT_WIDTH * len(label) + 2:
                yield text(x + width / 2, top + height / 2 + 4, label,
                           'text-anchor="middle" pointer-events="none"')

    def legend(self, y):
        for i, (kind, (name, _)) in enumerate(KINDS.items()):
            x = LABEL_WIDTH + 140 * i
            yield rect(x, y - 11, 14, 14, colour(kind, FIRST_LIGHTNESS))
            yield text(x + 20, y, f"{kind} {name}")
        lighter = "lighter: a later stage of the rank; " if self.timeline["num_stages"] > len(self.ranks) else ""
        yield text(LABEL_WIDTH, y + 18, f"numbers: microbatches; {lighter}grey: bubble", 'fill="#555"')

    def lines(self):
        width, height = round(self.x_of(self.step_ms) + NOTE_WIDTH), round(self.bottom + LEGEND_HEIGHT)
        yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
               f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">')
        yield rect(0, 0, width, height, "white")
        yield text(LABEL_WIDTH, 20, self.timeline["title"], 'font-size="15" font-weight="bold"')
        yield from self.axis()
        for number, rank in enumerate(self.ranks):
            yield from self.row(number, rank)
        yield from self.legend(self.bottom + 40)
        yield "</svg>"


def svg_of(timeline):
    return "\n".join(Picture(timeline).lines()) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="?", type=argparse.FileType("r", encoding="utf-8"), default="-",
                        help="what cadre schedule --json has written")
    parser.add_argument("output", nargs="?", default="-", help="the picture")
    options = parser.parse_args()
    picture = svg_of(json.load(options.input))
    if options.output == "-":
        sys.stdout.write(picture)
    else:
        with open(options.output, "w", encoding="utf-8") as file:
            file.write(picture)


if __name__ == "__main__":
    main()
