"""Turns the comments of a header into comments for Doxygen, line by line.

Cadre's headers have plain `//` comments: one at the head of the file, one above a declaration, or
one behind it. None of them is written for Doxygen, so characters that are special to it are
replaced, and comments in a function's body are dropped. Lines keep their numbers, so that a warning
names the right line.
"""

import re

COMMENT = re.compile(r"^(\s*)//(?!/) ?(.*)$")
# A comment after code in the same line. No string in a header contains "//".
TRAILING = re.compile(r"^(\s*\S.*?)(\s*)// ?(.*)$")
FOR_TOOLS = re.compile(r"NOLINT|clang-format (?:on|off)|namespace ")
DECLARES_MEMBERS = re.compile(r"\b(?:namespace|class|struct|union|enum|extern)\b[^()=]*$|^\s*$")
LIST_ITEM = re.compile(r" *(?:-|\d+\.) ")
# Characters that are special to Doxygen are replaced by private ones, which it passes through unchanged.
SPECIAL = "\\@&<>#%$\"/"
HIDDEN = {ord(character): 0xE000 + index for index, character in enumerate(SPECIAL)}
LITERAL = re.compile(r""""(?:[^"\\]|\\.)*"|(?<![0-9a-fA-F])'(?:[^'\\]|\\.)'""")


def hidden(text):
    """Returns `text` in a form that Doxygen prints unchanged; text between backticks becomes
    code."""
    text = text.translate({key: value for key, value in HIDDEN.items() if key != ord("/")})
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def marked_examples(lines):
    """Returns the lines of one comment with markers for Doxygen: lines that are indented and belong
    to no list are an example or a table, which Doxygen then prints without changes."""
    result, in_list = list(lines), False
    for index, text in enumerate(lines):
        in_list = bool(text) and (in_list or bool(LIST_ITEM.match(text)))
        if in_list or not text.startswith("  "):
            result[index] = re.sub(r"^( *)\d+\. ", r"\1-# ", hidden(text))
            continue
        begins = index == 0 or not lines[index - 1].startswith("  ")
        ends = index + 1 == len(lines) or not lines[index + 1].startswith("  ")
        result[index] = ("\\verbatim " if begins else "") + text.translate(HIDDEN) + (
            " \\endverbatim" if ends else "")
    return result


class Blocks:
    """Keeps track, line by line, of the open braces, and of whether they belong to a type, a
    namespace or a function body."""

    def __init__(self):
        self.open = []
        self.statement = ""

    def in_body(self):
        return "body" in self.open

    def read(self, code):
        for token in re.split(r"([{};])", LITERAL.sub("", code)):
            if token == "{":
                self.open.append("members" if DECLARES_MEMBERS.search(self.statement) else "body")
            elif token == "}" and self.open:
                self.open.pop()
            if token in "{};" and token:
                self.statement = ""
            elif not token.lstrip().startswith("#"):
                self.statement += " " + token


def code_of(line):
    if COMMENT.match(line):
        return ""
    match = TRAILING.match(line)
    return match.group(1) if match else line


def joined(lines):
    """If a line of a comment ends within `code`, moves the rest of the code from the next line to
    this one, so that both backticks are on one line."""
    lines = list(lines)
    for index, line in enumerate(lines[:-1]):
        below = COMMENT.match(lines[index + 1])
        if "//" in line and line[line.index("//"):].count("`") % 2 and below and "`" in below.group(2):
            head, rest = below.group(2).split("`", 1)
            lines[index] = f"{line} {head}`"
            lines[index + 1] = f"{below.group(1)}// {rest.lstrip()}"
    return lines


def for_doxygen(text):
    lines = joined(text.split("\n"))
    blocks, result = Blocks(), []
    trailing_column = None
    for index, line in enumerate(lines):
        whole, behind = COMMENT.match(line), None
        if not whole:
            behind = TRAILING.match(line)
        body_before = blocks.in_body()
        blocks.read(code_of(line))
        if body_before or (blocks.in_body() and not behind):
            result.append("" if whole else code_of(line))
            trailing_column = None
        elif whole and FOR_TOOLS.match(whole.group(2)):
            result.append("")
        elif whole and trailing_column == len(whole.group(1)):
            result.append(f"{whole.group(1)}///< {hidden(whole.group(2))}")
        elif whole:
            trailing_column = None
            result.append(f"{whole.group(1)}/// {whole.group(2)}".rstrip())
        elif behind and not FOR_TOOLS.match(behind.group(3)):
            trailing_column = len(behind.group(1) + behind.group(2))
            result.append(f"{behind.group(1)}{behind.group(2)}///< {hidden(behind.group(3))}")
        else:
            trailing_column = None
            result.append(code_of(line))
    return "\n".join(without_loose_comments(result))


def without_loose_comments(lines):
    """Removes comments that no declaration follows; the comment at the head of the file becomes the
    comment of the file."""
    lines = list(lines)
    if "#pragma once" in lines:
        place = lines.index("#pragma once")
        if all(line.startswith("///") for line in lines[:place]):
            lines[place] = "/// \\file"
    index = 0
    while index < len(lines):
        line = lines[index]
        if line.lstrip().startswith("///") and not re.match(r"\s*///(?:<| \\file)", line):
            end = index
            while end < len(lines) and re.match(r"\s*///(?!<| \\file)", lines[end]):
                end += 1
            follows = lines[end].strip() if end < len(lines) else ""
            if not follows or follows[0] in "}#":
                lines[index:end] = [""] * (end - index)
            else:
                prefix = line[:line.index("///")]
                texts = marked_examples([text.strip()[3:].removeprefix(" ") for text in lines[index:end]])
                lines[index:end] = [f"{prefix}/// {text}".rstrip() for text in texts]
            index = end
        else:
            index += 1
    return lines
