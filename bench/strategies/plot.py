"""Draws horizontal bars as SVG: a panel for each figure, a group of bars for each row, and a colour for each of the two
libraries."""

import html

ROW_HEIGHT, LABEL_WIDTH, PANEL_WIDTH, GAP, TOP = 40, 170, 300, 90, 60
COLOURS = ("#2b6cb0", "#dd8452")


def text(x, y, content, **attributes):
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{given}>{html.escape(content)}</text>'


def bar(x, y, width, colour):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="13" fill="{colour}"/>'


def bars(title, sides, labels, panels):
    """Returns the SVG. Each panel is (title, number format, for each label the figures of both libraries or None)."""
    width = LABEL_WIDTH + len(panels) * (PANEL_WIDTH + GAP)
    height = TOP + ROW_HEIGHT * len(labels) + 10
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
             f'font-size="12">', f'<rect width="{width}" height="{height}" fill="white"/>',
             text(10, 20, title, font_size=15)]
    for i, (side, colour) in enumerate(zip(sides, COLOURS)):
        parts += [bar(LABEL_WIDTH + 110 * i, 29, 13, colour), text(LABEL_WIDTH + 110 * i + 18, 40, side)]
    for i, label in enumerate(labels):
        parts.append(text(LABEL_WIDTH - 8, TOP + ROW_HEIGHT * i + 20, label, text_anchor="end"))
    for number, (name, form, rows) in enumerate(panels):
        left = LABEL_WIDTH + number * (PANEL_WIDTH + GAP)
        largest = max(value for row in rows for value in row if value is not None)
        parts.append(text(left, TOP - 5, name, font_weight="bold"))
        for i, row in enumerate(rows):
            for k, value in enumerate(row):
                if value is None:
                    continue
                length, y = PANEL_WIDTH * value / largest, TOP + ROW_HEIGHT * i + 4 + 15 * k
                parts += [bar(left, y, length, COLOURS[k]), text(left + length + 4, y + 11, form.format(value))]
    return "\n".join([*parts, "</svg>", ""])
