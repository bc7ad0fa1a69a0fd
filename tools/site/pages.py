"""Gathers the pages of the site from the repository and forms them for mkdocs.

A page has the path in the site that it has in the repository, so links between pages stay. All
pages of docs/ are there, the reports of bench/, and the files to which these pages link: a source
becomes a page that shows it, a folder a page that lists it. Markdown is written for GitHub here;
mkdocs needs an empty line before lists and tables.
"""

import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
import documents_test as documents

START = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
IMAGES = (".svg", ".png")
LANGUAGES = {".h": "cpp", ".cpp": "cpp", ".py": "python", ".sh": "bash", ".toml": "toml", ".cmake": "cmake"}
LIST_ITEM = re.compile(r" *(?:[-*]|\d+\.) ")
LINK_TO_FILE = re.compile(r"\[([\w-]+\.md)\]\(([^)\s]+)\)")
COMMENT = re.compile(r"<!--.*?-->", re.S)


def topics_of(root):
    """Returns {topic header: its component} and {topic header or part: the topic header}, from
    docs/installed-headers.txt."""
    lines = [line.split() for line in (root / "docs/installed-headers.txt").read_text().splitlines()
             if line.strip() and not line.startswith("#")]
    components = {header: component for component, kind, header in lines if kind == "topic"}
    parts = {header for _, kind, header in lines if kind == "part"}
    topics = {topic: topic for topic in components}
    topics |= {part: topic for topic in components
               for part in re.findall(r'^#include "([^"]+)"', (root / topic).read_text(), re.M) if part in parts}
    return components, topics


def title_of(text):
    return re.sub(r"[`*]", "", documents.HEADING.search(text).group(1))


def outside_of_fences(text, change):
    """Returns `text` with `change` applied to everything outside of code blocks."""
    result, end = [], 0
    for match in documents.FENCED.finditer(text):
        result += [change(text[end:match.start()]), match.group(0)]
        end = match.end()
    return "".join(result + [change(text[end:])])


def formed_lists(text):
    """Returns the text with an empty line where a list or a table begins or ends. Indents the lines
    that belong to an item by 4, as mkdocs needs; GitHub needs them below the item's text."""
    result, fence, before = [], None, ""
    items = []  # the columns at which the texts of the open items begin
    after_fence = False
    is_loose = False  # whether the last item has several paragraphs or blocks
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if fence is not None:
            result.append(("    " * len(items) + line[min(indent, fence):]) if line.strip() else "")
            fence = None if re.match(r" *```\s*$", line) else fence
            after_fence = fence is None
            before, is_loose = line, True
            continue
        item = LIST_ITEM.match(line)
        opens_fence = re.match(r" *```", line)
        was_open = len(items)
        if line.strip() and (item or opens_fence or not before.strip()):
            while items and indent < items[-1]:
                items.pop()
        is_border = before.strip() and line.strip() and line.startswith("|") != before.startswith("|")
        ends_block = before.strip() and line.strip() and after_fence
        begins_list = item and before.strip() and (is_loose or len(items) >= max(was_open, 1) or not was_open)
        if is_border or ends_block or begins_list and not LIST_ITEM.match(before) or opens_fence and before.strip():
            result.append("")
        belongs = items and line.strip() and (indent or item)
        result.append("    " * len(items) + (line[indent:] if not opens_fence else line.lstrip()) if belongs else line)
        if item:
            items.append(item.end())
            is_loose = False
        elif items and line.strip() and not before.strip():
            is_loose = True
        if opens_fence:
            fence = indent
        before, after_fence = line, False
    return "\n".join(result)


class Site:
    """The pages by path: {"docs/README.md": text}. `page_of` also finds the pages of the reference.
    `headers`: the topic header of each topic header and part; the reference has one page for each
    topic."""

    def __init__(self, root, headers):
        self.root, self.headers = root, headers
        self.tracked = documents.listed_files(root)
        self.texts = {}
        self.images = []
        self.classes = {}  # name of a public class: its page and anchor

    def page_of(self, name):
        """Returns the page that shows a header or a document (whose name may be abbreviated), or None."""
        for header in (name, f"include/{name}"):
            if header in self.headers:
                return f"reference/{pathlib.PurePosixPath(self.headers[header]).stem}.md"
        if name in self.tracked and name.endswith(".md"):
            return name
        if "/" in name:
            found = [page for page in self.tracked if page.startswith(f"{name}-") and page.endswith(".md")]
        else:
            found = [page for page in self.tracked if page.startswith("docs/") and page.endswith(f"/{name}")]
        return found[0] if found and found[0].startswith("docs/") else None

    def gather(self):
        waiting = [page for page in self.tracked
                   if page.endswith(".md") and (page in START or page.startswith(("docs/", "bench/reports/")))]
        while waiting:
            page = waiting.pop()
            if page in self.texts:
                continue
            text = (self.root / page).read_text()
            self.texts[page] = None  # before its links, one of which may lead back
            self.texts[page] = outside_of_fences(
                formed_lists(COMMENT.sub("", text)), lambda part, page=page: self.formed(page, part, waiting))
            if not page.startswith(("bench/", "CHANGELOG")):
                self.texts[page] = self.with_links_to_reference(page, self.texts[page])

    def formed(self, page, text, waiting):
        """Converts links for the site; a link whose text is the file name of a page gets the page's title."""
        def titled(match):
            named = os.path.normpath(os.path.join(os.path.dirname(page), match.group(2).partition("#")[0]))
            if os.path.basename(named) != match.group(1) or named not in self.tracked:
                return match.group(0)
            title = title_of((self.root / named).read_text()).split(":")[0]
            return f"[{title}]({match.group(2)})"

        def link(match):
            place = self.place_of(page, match.group(1), waiting)
            return match.group(0).replace(match.group(1), place) if place else match.group(0)

        # The text of a link may contain code, so text that is split at code must keep the link's target.
        parts = re.split(r"(`[^`\n]+`)", text)
        return "".join(part if index % 2 else documents.LINK.sub(link, LINK_TO_FILE.sub(titled, part))
                       for index, part in enumerate(parts))

    def place_of(self, page, target, waiting):
        """Returns the link's target in the site, after adding its page if it is missing. Returns
        None if the link is not changed; mkdocs reports such a link if it is dead."""
        path, mark, anchor = target.partition("#")
        if not path or documents.SCHEME.match(target):
            return None
        named = os.path.normpath(os.path.join(os.path.dirname(page), path))
        if not (self.root / named).exists():
            return None
        if named in self.headers:
            place = self.page_of(named)
        elif named == "include/cadre":
            place = "reference/README.md"  # which lists the headers
        elif (self.root / named).is_dir():
            place = self.folder(named, waiting)
        elif named.endswith(".md"):
            waiting.append(named)
            return None
        elif named.endswith(IMAGES):
            self.images.append(named)
            return None
        else:
            place = self.source(named)
        return os.path.relpath(place, os.path.dirname(page) or ".") + mark + anchor

    def folder(self, name, waiting):
        readme = f"{name}/README.md"
        if readme in self.tracked:
            waiting.append(readme)
        elif readme not in self.texts:
            files = [file for file in self.tracked if os.path.dirname(file) == name]
            pages = [file for file in files if file.endswith(".md")]
            waiting += pages
            shown = [(file, title_of((self.root / file).read_text())) for file in pages] or [
                (self.source(file), f"`{os.path.basename(file)}`") for file in files]
            self.texts[readme] = f"# {name.split('/')[-1].capitalize()}\n\n" + "".join(
                f"- [{title}]({os.path.basename(file)})\n" for file, title in shown)
        return readme

    def source(self, name):
        page = f"{name}.md"
        if page not in self.texts:
            text = (self.root / name).read_text()
            first = text.split("\n", 1)[0]
            language = LANGUAGES.get(os.path.splitext(name)[1]) or (
                "python" if "python" in first else "bash" if first.startswith("#!") else "text")
            self.texts[page] = f"# {name}\n\n````{language}\n{text}````\n"
        return page

    def with_links_to_reference(self, page, text):
        """Returns the text with links to the reference from code that names a header, and in the
        guide from the first mention of a public class: `<cadre/mesh.h>`, `DeviceMesh`,
        `cadre::DeviceMesh`."""
        seen = set() if page.startswith(("docs/guide/", "README.md")) else set(self.classes)

        def link(match):
            if match.group(0).startswith("["):
                return match.group(0)
            code = match.group(1)
            target = self.page_of(code.strip("<>")) if code.strip("<").startswith("cadre/") else None
            name = code.removeprefix("cadre::")
            if target is None and name in self.classes and name not in seen:
                seen.add(name)
                target = "{}#{}".format(*self.classes[name])
            if target is None:
                return match.group(0)
            return f"[`{code}`]({os.path.relpath(target, os.path.dirname(page) or '.')})"

        def change(part):
            return "\n".join(line if line.startswith("#") else
                             re.sub(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\([^)]*\)|`([^`\n]+)`", link, line)
                             for line in part.split("\n"))

        return outside_of_fences(text, change)

    # The navigation.

    def navigation(self, reference):
        """Returns the navigation for mkdocs.yml. docs/README.md has the groups of the guide and
        their order; `reference` is the navigation of the headers."""
        index = "docs/README.md"
        guide, formats = [index], []
        for heading, pages in self.map():
            if pages and all(page.startswith("docs/guide/") for page in pages):
                guide.append({heading.split(":")[0]: [self.titled(page) for page in pages]})
            elif heading == "Formats":
                formats = pages
        lists = {name: self.folder(f"docs/{name}", []) for name in ("formats", "decisions")}
        decisions = [self.titled(page) for page in sorted(self.texts)
                     if os.path.dirname(page) == "docs/decisions" and page != lists["decisions"]]
        project = [page for page in ("docs/status.md", "docs/glossary.md", "docs/where-to-change.md", *START[1:])
                   if page in self.texts]
        reports = [page for page in ("bench/reports/README.md",) if page in self.texts]
        return [{"Home": START[0]}, {"Guide": guide}, {"API": reference},
                {"Formats": [lists["formats"], *formats]}, {"Decisions": [lists["decisions"], *decisions]},
                {"Project": project + reports}]

    def titled(self, page):
        """Returns a page with its title for the navigation: its heading up to the first colon,
        except a colon after a number."""
        return {re.match(r"(?:\d+: )?[^:]*", title_of((self.root / page).read_text())).group(0): page}

    def map(self):
        """Returns (heading, pages) of each section of docs/README.md."""
        parts = re.split(r"^#+ +(.*)$", (self.root / "docs/README.md").read_text(), flags=re.M)
        for heading, text in zip(parts[1::2], parts[2::2]):
            targets = [target.partition("#")[0] for _, target in documents.links_of(text)]
            pages = [os.path.normpath(f"docs/{target}") for target in targets if target.endswith(".md")]
            yield heading, list(dict.fromkeys(pages))
