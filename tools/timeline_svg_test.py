#!/usr/bin/env python3
"""Tests tools/timeline_svg.py with the output of `cadre schedule --json`.

    timeline_svg_test.py COMMAND      (the program cadre)
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

SCRIPT = pathlib.Path(__file__).resolve().parent / "timeline_svg.py"
SVG = "{http://www.w3.org/2000/svg}"
SECONDS = 20
NUM_RECTS_OF_LEGEND = 4


def timeline_of(*words):
    return subprocess.run([COMMAND, "schedule", *words, "--json", "-"], check=True, capture_output=True, text=True,
                          timeout=SECONDS).stdout


def drawn(text):
    picture = subprocess.run([sys.executable, SCRIPT], input=text, check=True, capture_output=True, text=True,
                             timeout=SECONDS).stdout
    return xml.etree.ElementTree.fromstring(picture)


def boxes_of(picture):
    """Returns the boxes of computations: (left, right, top, height, tooltip)."""
    found = []
    for rect in picture.iter(f"{SVG}rect"):
        tip = rect.find(f"{SVG}title")
        if tip is not None:
            x, y, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            found.append((x, x + width, y, height, tip.text))
    return found


class TimelineSvg(unittest.TestCase):
    def test_each_computation_is_a_box_over_its_time(self):
        picture = drawn(timeline_of("--name", "1f1b", "--ranks", "2", "--microbatches", "3"))
        boxes = boxes_of(picture)
        self.assertEqual(len(boxes), 2 * 3 * 2)
        self.assertEqual(len(list(picture.iter(f"{SVG}rect"))), 1 + 2 + len(boxes) + NUM_RECTS_OF_LEGEND)
        # The step takes (m + p - 1)(F + B) = 12 ms, which the picture draws in 620 pixels.
        left = 70
        self.assertEqual(min(box[0] for box in boxes), left)
        self.assertAlmostEqual(max(box[1] for box in boxes), left + 620, places=1)
        by_tip = {box[4]: box for box in boxes}
        self.assertIn("0B2: 10 to 12 ms", by_tip)
        first_backward = by_tip["1B0: 2 to 4 ms"]
        self.assertAlmostEqual(first_backward[0], left + 620 * 2 / 12, places=1)
        self.assertAlmostEqual(first_backward[1], left + 620 * 4 / 12, delta=0.11)
        self.assertEqual(len({box[2] for box in boxes}), 2)
        texts = [each.text for each in picture.iter(f"{SVG}text")]
        self.assertIn("1f1b: 2 stages on 2 ranks, 3 microbatches", texts)
        self.assertEqual([each for each in texts if each.startswith("bubble ")],
                         ["bubble 25.0 %, 2 live", "bubble 25.0 %, 1 live"])
        self.assertEqual([texts.count(str(microbatch)) for microbatch in range(3)], [4, 5, 5])  # 1 and 2 are ticks, too

    def test_an_overlap_has_two_boxes_one_below_the_other(self):
        boxes = boxes_of(drawn(timeline_of("--name", "dualpipe-v", "--ranks", "3", "--microbatches", "8")))
        self.assertEqual({box[3] for box in boxes}, {15, 30})
        halves = [box for box in boxes if box[3] == 15]
        self.assertTrue(all("OVERLAP_F_B: " in box[4] for box in halves))
        self.assertEqual(len(halves) % 2, 0)

    def test_messages_have_no_boxes(self):
        words = ("--name", "gpipe", "--ranks", "3", "--microbatches", "2", "--message-ms", "0.5")
        lowered = timeline_of(*words, "--lower", "as-sent")
        self.assertIn("SEND_F", lowered)
        self.assertEqual(len(boxes_of(drawn(lowered))), len(boxes_of(drawn(timeline_of(*words)))))

    def test_a_title_and_a_file_name_are_taken_as_they_are(self):
        timeline = json.loads(timeline_of("--name", "gpipe", "--ranks", "1", "--microbatches", "1"))
        timeline["title"] = "a & <b>"
        with tempfile.TemporaryDirectory() as folder:
            source, target = pathlib.Path(folder, "step.json"), pathlib.Path(folder, "step.svg")
            source.write_text(json.dumps(timeline))
            subprocess.run([sys.executable, SCRIPT, source, target], check=True, timeout=SECONDS)
            texts = [each.text for each in xml.etree.ElementTree.parse(target).iter(f"{SVG}text")]
        self.assertIn("a & <b>", texts)

    def test_a_step_without_length_has_no_scale(self):
        timeline = json.loads(timeline_of("--name", "gpipe", "--ranks", "2", "--microbatches", "1"))
        for step_ms in (0, 1e-310):
            timeline["step_ms"] = step_ms
            picture = xml.etree.ElementTree.tostring(drawn(json.dumps(timeline)), encoding="unicode")
            self.assertNotIn("nan", picture)
            self.assertNotIn("inf", picture)


if __name__ == "__main__":
    COMMAND = sys.argv.pop(1)
    unittest.main()
