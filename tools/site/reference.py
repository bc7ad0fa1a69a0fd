"""Makes a Markdown page of each topic from the XML that Doxygen writes of its header and of the parts.

A page has the comment of the topic header, then a section for each part in the order of that header: the comment at
the head, then each class, function, enumeration and constant with its comment. Functions that follow each other without an empty line or a comment between
them share the comment above the first one, as they do in the header.
"""

import itertools
import os
import pathlib
import re
import subprocess
import textwrap
import xml.etree.ElementTree as ElementTree

import comments

LINE_LENGTH = 88
# First words of sentences in a header's comment that begin a paragraph of their own on the page.
LABELS = re.compile(r"(?:(?<=^)|(?<=[.;:)] ))(Threads|Blocking|Lifetime|Errors|Source|Guide|Format|Design|PyTorch|Results|"
                    r"Parameters|Collective|REQUIRES): ")
NAMED_FILE = re.compile(r"\b(docs/(?:guide|formats|decisions)/[\w./-]*\w|(?:[\w-]+/)*\w+\.h|[\w-]+\.md)\b")


class Failed(Exception):
    pass


def run_doxygen(headers, root, doxyfile, work):
    """Writes Doxygen's XML of the headers (paths below `root`) to work/xml."""
    for header in headers:
        copy = work / "headers" / header
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(comments.for_doxygen((root / header).read_text()))
    settings = work / "Doxyfile"
    settings.write_text(f"{doxyfile.read_text()}INPUT = {work}/headers\nSTRIP_FROM_PATH = {work}/headers\n"
                        f"OUTPUT_DIRECTORY = {work}\n")
    result = subprocess.run(["doxygen", str(settings)], capture_output=True, text=True)
    if result.returncode != 0:
        found = sorted(set(line for line in result.stderr.splitlines() if line.strip()))
        raise Failed("\n".join(found).replace(f"{work}/headers/", ""))
    return work / "xml"


def parsed(path):
    """Parses an XML file, and restores the characters that were hidden from Doxygen."""
    shown = {hidden: f"&#{special};" for special, hidden in comments.HIDDEN.items()}
    return ElementTree.fromstring(path.read_text().translate(shown))


def text_of(element):
    """Returns all text of a code element, with the spaces that clang-format would use."""
    text = "" if element is None else " ".join("".join(element.itertext()).split())
    text = re.sub(r"(?<!operator)<\s+", "<", text)
    return re.sub(r"(?<=[^\s-])\s+(>+)(?=[\s,;&*(){>:]|$)", r"\1", text)


def escaped(text):
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)


def split_arguments(text):
    """Splits `text` at commas that are not inside brackets."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "(<[{") - (character in ")]}" or (character == ">" and text[index - 1] != "-"))
        if character == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return parts + [text[start:].strip()]


def folded(signature):
    """Breaks a declaration into lines of at most LINE_LENGTH, where possible."""
    if len(signature) <= LINE_LENGTH or "(" not in signature:
        return signature
    opening = signature.index("(", signature.index("operator()") + 10 if "operator()" in signature else 0)
    depth, closing = 0, len(signature)
    for index in range(opening, len(signature)):
        depth += (signature[index] == "(") - (signature[index] == ")")
        if depth == 0:
            closing = index
            break
    lines, line = [signature[:opening + 1]], ""
    for part in split_arguments(signature[opening + 1:closing]):
        if line and len(line) + len(part) + 6 > LINE_LENGTH:
            lines.append("    " + line.rstrip())
            line = ""
        line += part + ", "
    return "\n".join(lines + ["    " + line.removesuffix(", ") + signature[closing:]])


class Reference:
    """The pages of all topics. `headers`: the topic header of each topic header and part. `page_of` gives the page of
    a header or of a document, or None."""

    def __init__(self, xml, headers, root, page_of):
        self.xml, self.root, self.page_of = xml, root, page_of
        self.headers = headers
        self.lines = {header: (root / header).read_text().split("\n") for header in headers}
        self.compounds = {}
        for entry in parsed(xml / "index.xml"):
            self.compounds[entry.get("refid")] = parsed(xml / f"{entry.get('refid')}.xml")[0]
        self.files = {compound.find("location").get("file"): compound for compound in self.compounds.values()
                      if compound.get("kind") == "file"}
        self.in_namespaces = {header: [] for header in headers}
        for compound in self.compounds.values():
            if compound.get("kind") == "namespace":
                for member in compound.iter("memberdef"):
                    self.in_namespaces[member.find("location").get("file")].append(member)
            elif compound.get("kind") == "concept":
                self.in_namespaces[compound.find("location").get("file")].append(compound)
        self.anchor_of = {}
        self.anchors = {page_of(header): set() for header in headers}
        self.named = {}  # name of a class or function: its header and anchor
        self.place = {self.files[header].get("id"): (header, "top" if headers[header] == header else self.new_anchor(
            header, os.path.basename(header))) for header in headers}  # id of Doxygen: its anchor
        self.outline = {header: self.read(header) for header in headers}
        self.parts = {compound.get("id"): self.members(header, compound) for header in headers
                      for compound, *_ in self.outline[header] if compound.tag == "compounddef"}

    # The declarations of a header, in their order.

    def read(self, header):
        compound = self.files[header]
        entries = []
        for inner in compound.findall("innerclass"):
            entries.append(self.compounds[inner.get("refid")])
        entries += compound.iter("memberdef")
        entries += self.in_namespaces[header]
        entries.sort(key=lambda entry: int(entry.find("location").get("line")))
        groups = self.grouped(header, [entry for entry in entries if self.is_shown(entry)], "")
        return groups

    @staticmethod
    def is_shown(entry):
        if entry.get("prot") == "private":
            return False
        kind = entry.get("kind")
        text = text_of(entry.find("definition")) + text_of(entry.find("argsstring"))
        if kind == "friend" and ("(" not in text or text.endswith("=default")):
            return False
        is_deduction_guide = kind == "function" and "->" in text and not text_of(entry.find("type"))
        return not is_deduction_guide and not text_of(entry.find("name")).startswith("@")

    @staticmethod
    def name(entry):
        name = text_of(entry.find("compoundname") if entry.tag == "compounddef" else entry.find("qualifiedname"))
        name = name or text_of(entry.find("name"))
        return name.removeprefix("cadre::")

    def new_anchor(self, header, name):
        base = re.sub(r"[^\w-]+", "-", name).strip("-")
        taken = self.anchors[self.page_of(header)]
        found = next(anchor for anchor in (f"{base}-{n}" if n > 1 else base for n in itertools.count(1))
                     if anchor not in taken)
        taken.add(found)
        return found

    def members(self, header, compound):
        found = [member for section in compound.findall("sectiondef") for member in section.findall("memberdef")]
        found = [member for member in found if self.is_shown(member)]
        found.sort(key=lambda member: int(member.find("location").get("line")))
        return self.grouped(header, found, self.name(compound))

    def grouped(self, header, entries, owner):
        """Returns lists of entries that share a comment; the fields of a class are also one
        list."""
        groups, last_line = [], None
        for entry in entries:
            place = entry.find("location")
            line = int(place.get("line"))
            between = self.lines[header][last_line - 1:line - 1] if last_line else ["//"]
            together = "//" not in "".join(between) and all(text.strip() for text in between)
            if groups and self.share_comment(groups[-1][0], entry, owner, together):
                groups[-1].append(entry)
            else:
                groups.append([entry])
            self.set_place(header, groups[-1][0], entry, owner)
            body_end = place.get("bodyend", "-1")
            last_line = max(line, int(body_end)) if entry.get("kind") == "function" else line
        return groups

    def share_comment(self, first, entry, owner, together):
        kinds = {first.get("kind"), entry.get("kind")}
        if owner and "variable" in kinds:
            return len(kinds) == 1
        return together and kinds <= {"function", "friend", "variable", "typedef"} and not self.has_comment(entry)

    def set_place(self, header, first, entry, owner):
        """Sets the target of links to an entry: the heading of its group, or for a field that of
        its class."""
        if first is not entry:
            place = self.place[first.get("id")]
        elif owner and entry.get("kind") == "variable":
            place = (header, self.anchor_of[owner])
        else:
            place = (header, self.new_anchor(header, self.name(entry)))
        self.place[entry.get("id")] = place
        if not owner:
            self.named.setdefault(self.name(entry), place)
        if entry.tag == "compounddef":
            self.anchor_of[self.name(entry)] = place[1]
        for value in entry.findall("enumvalue"):
            self.place[value.get("id")] = place

    @staticmethod
    def has_comment(entry):
        return any("".join(entry.find(tag).itertext()).strip()
                   for tag in ("briefdescription", "detaileddescription") if entry.find(tag) is not None)

    def classes(self):
        """Returns {name: (header, anchor)} of each class, structure and concept of namespace cadre
        itself."""
        found = {}
        for header in self.headers:
            for compound, *_ in self.outline[header]:
                if compound.tag == "compounddef" and re.fullmatch(r"\w+", self.name(compound)):
                    found[self.name(compound)] = self.place[compound.get("id")]
        return found

    def purpose(self, header):
        """Returns the first sentence of the header's comment, for a cell of a table."""
        text = self.comment(header, self.files[header]).split("\n")[0]
        sentence = re.match(r"(.*?[.:])(?=\s|$)", text)
        return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence.group(1) if sentence else text).rstrip(":.")

    # Comments.

    def link(self, header, refid, text):
        found = self.place.get(refid)
        if not found or found[0] not in self.headers:
            return text
        return f"[{text}]({self.to(header, found)})"

    def to(self, header, place):
        """Returns the target of a link from the page of `header`."""
        page = self.page_of(place[0])
        return f"{'' if page == self.page_of(header) else self.relative(header, page)}#{place[1]}"

    def relative(self, header, page):
        return os.path.relpath(page, pathlib.PurePosixPath(self.page_of(header)).parent)

    def file_links(self, header, text, is_code=False):
        """Returns the text with links to the documents and headers that it names. A link to a page
        of the guide has the title of the page as its text."""
        result, end = "", 0
        plain = (lambda part: part) if is_code else escaped
        for match in NAMED_FILE.finditer(text):
            page = self.page_of(match.group(1)) or self.page_beside(header, match.group(1))
            if page and page != self.page_of(header):
                name = match.group(1)
                if name.endswith(".md") and page.startswith("docs/guide/"):
                    name = re.search(r"^# +([^:\n]*)", (self.root / page).read_text(), re.M).group(1)
                result += f"{plain(text[end:match.start()])}[{escaped(name)}]({self.relative(header, page)})"
                end = match.end()
        return result + plain(text[end:])

    def page_beside(self, header, named):
        """Returns the page of a header that is named by the end of its path. The header must be in
        the folder of this header, or be the only one with that end."""
        beside = str(pathlib.PurePosixPath(header).parent / named)
        if beside in self.headers:
            return self.page_of(beside)
        found = [other for other in self.headers if other.endswith("/" + named)]
        return self.page_of(found[0]) if len(found) == 1 else None

    def inline(self, header, element):
        def tail(text):
            return self.file_links(header, text or "")

        result = tail(element.text)
        for child in element:
            if child.tag == "computeroutput":
                code = "".join(child.itertext())
                fence = "``" if "`" in code else "`"
                page = NAMED_FILE.fullmatch(code) and self.file_links(header, code, is_code=True)
                shown = page if page and page != code else f"{fence}{code}{fence}"
                place = self.named.get(code.removesuffix("()")) if self.headers[header] == header else None
                result += f"[{shown}]({self.to(header, place)})" if place else shown
            elif child.tag == "ref":
                result += self.link(header, child.get("refid"), escaped("".join(child.itertext())))
            elif child.tag in ("itemizedlist", "orderedlist"):
                for item in child.findall("listitem"):
                    result += "\n\n- " + " ".join(self.inline(header, para) for para in item)
                result += "\n\n"
            elif child.tag == "verbatim":
                code = "".join(child.itertext()).strip("\n").rstrip()
                first, *rest = re.sub(r"(?m)^ *///", "", code).split("\n")
                code = "\n".join([first.strip(), textwrap.dedent("\n".join(rest))]).strip()
                result += f"\n\n```{'cpp' if ';' in code else 'text'}\n{code}\n```\n\n"
            elif child.tag in ("ulink", "linebreak", "sp", "emphasis", "bold", "ndash", "mdash"):
                result += {"ndash": "--", "mdash": "---"}.get(child.tag) or escaped("".join(child.itertext()) or " ")
            else:
                raise Failed(f"{header}: the reference has no form for <{child.tag}> in a comment")
            result += tail(child.tail)
        return result

    def comment(self, header, entry):
        paragraphs = []
        for tag in ("briefdescription", "detaileddescription"):
            for para in entry.find(tag) if entry.find(tag) is not None else ():
                text = LABELS.sub(r"\n\n**\1:** ", self.inline(header, para).strip())
                paragraphs.append(re.sub(r"(?m)^(\d+)\. | +$", lambda match: match.group(1) + "\\. " if match.group(1) else "", text.strip()))
        return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)

    # Declarations.

    @staticmethod
    def template_head(entry):
        parameters = entry.find("templateparamlist")
        if parameters is None:
            return ""

        def text(parameter):
            name, default = text_of(parameter.find("declname")), text_of(parameter.find("defval"))
            return text_of(parameter.find("type")) + (f" {name}" if name else "") + (f" = {default}" if default else "")

        requires = text_of(entry.find("requiresclause"))
        return f"template <{', '.join(text(parameter) for parameter in parameters)}>\n" + (
            f"  requires {requires}\n" if requires else "")

    @staticmethod
    def enumeration(entry):
        strong = "enum class" if entry.get("strong") == "yes" else "enum"
        values, underlying = entry.findall("enumvalue"), text_of(entry.find("type"))
        head = f"{strong} {text_of(entry.find('name'))}" + (f" : {underlying}" if underlying else "")
        if any(Reference.has_comment(value) for value in values):
            return head + ";"  # a list below has the values
        names = [text_of(value.find("name")) for value in values]
        if len(names) < 6:
            return f"{head} {{ {', '.join(names)} }};"
        return f"{head} {{\n  " + ",\n  ".join(names) + "\n};"

    @staticmethod
    def function_or_variable(entry):
        arguments = re.sub(r"(?<=\w)=(?=\S)", " = ", text_of(entry.find("argsstring")))
        arguments = re.sub(r" ([&*]+(?:\.\.\.)?)(?=\w)", r"\1 ", arguments)
        arguments = re.sub(r"(?<=[\w>]) ([&*]+)(?=[,)>. ])", r"\1", arguments)
        is_virtual = entry.get("virt") in ("virtual", "pure-virtual") and "override" not in arguments
        result = text_of(entry.find("type")).removeprefix("virtual ").removeprefix("friend ")
        words = ["friend" if entry.get("kind") == "friend" else "", "static" if entry.get("static") == "yes" else "",
                 "virtual" if is_virtual else "", "explicit" if entry.get("explicit") == "yes" else "", result]
        head = re.sub(r" ([&*]+)$", r"\1", " ".join(word for word in words if word))
        initial = text_of(entry.find("initializer")) if entry.get("kind") == "variable" else ""
        text = f"{head} {text_of(entry.find('name'))}{arguments}{' ' + initial if initial else ''};".lstrip()
        return folded(re.sub(r"(\)|const|noexcept|override) *= ?(0|default|delete)\b", r"\1 = \2", text))

    @staticmethod
    def signature(entry):
        kind, name, template = entry.get("kind"), text_of(entry.find("name")), Reference.template_head(entry)
        if kind in ("class", "struct", "union"):
            bases = ", ".join(f"{base.get('prot')} {text_of(base)}" for base in entry.findall("basecompoundref"))
            return f"{template}{kind} {Reference.name(entry)}{' : ' + bases if bases else ''};"
        if kind == "concept":
            return text_of(entry.find("initializer")).replace("> concept cadre::", ">\nconcept ") + ";"
        if kind == "enum":
            return Reference.enumeration(entry)
        if kind == "define":
            arguments = ", ".join(text_of(param.find("defname")) for param in entry.findall("param"))
            return f"#define {name}" + (f"({arguments})" if arguments else "")
        if kind == "typedef":
            return f"{template}using {name} = {text_of(entry.find('type')).removeprefix('typedef ')};"
        return template + Reference.function_or_variable(entry)

    def fields(self, header, group):
        lines = []
        for field in group:
            comment = self.comment(header, field).replace("\n\n", " ")
            lines.append(f"- `{self.signature(field).rstrip(';')}`" + (f"  \n  {comment}" if comment else ""))
        return "\n".join(lines)

    def block(self, header, group, level, owner):
        first = group[0]
        if owner and first.get("kind") == "variable":
            return [self.fields(header, group)]
        names = []
        for entry in group:
            name = text_of(entry.find("name")) + ("()" if entry.get("kind") in ("function", "friend") else "")
            if name not in names:
                names.append(name)
        names.sort(key=lambda name: name.startswith("~"))  # a destructor is not what is looked for
        title = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        kind = f"{first.get('kind')} " if first.get("kind") in ("enum",) else ""
        parts = [f"{'#' * level} {kind}{escaped(title)} {{ #{self.place[first.get('id')][1]} }}",
                 "```cpp\n" + "\n".join(self.signature(entry) for entry in group) + "\n```"]
        parts += [text for text in (self.comment(header, entry) for entry in group) if text]
        values = [value for value in first.findall("enumvalue")]
        if any(self.has_comment(value) for value in values):
            parts.append("\n".join(
                f"- `{text_of(value.find('name'))}`" + (f": {self.comment(header, value)}" if self.has_comment(value)
                                                         else "") for value in values))
        return parts

    def class_signature(self, compound):
        signature = self.signature(compound)
        says_more = len(signature.split()) > 2 and not re.fullmatch(r"\w+ [\w:]+(?:<\w+>)?;", signature)
        return f"```cpp\n{signature}\n```" if says_more else ""

    def page(self, topic):
        """Returns the Markdown of a topic's page."""
        included = topic.removeprefix("include/")
        parts = [f"# {pathlib.PurePosixPath(topic).name} {{ #top }}",
                 f"```cpp\n#include <{included}>\n```", self.comment(topic, self.files[topic])]
        for header in self.headers:
            if self.headers[header] == topic != header:
                parts += self.section(header)
        return "\n\n".join(part for part in parts if part) + "\n"

    def section(self, header):
        """Returns the Markdown of all declarations of a part."""
        anchor = self.place[self.files[header].get("id")][1]
        parts = [f"## {escaped(header.removeprefix('cadre/'))} {{ #{anchor} }}", self.comment(header, self.files[header])]
        for group in self.outline[header]:
            compound = group[0]
            if compound.tag == "memberdef":
                parts += self.block(header, group, 3, "")
                continue
            name = self.name(compound)
            parts += [f"### {compound.get('kind')} {escaped(name)} {{ #{self.place[compound.get('id')][1]} }}",
                      self.class_signature(compound), self.comment(header, compound)]
            for members in self.parts[compound.get("id")]:
                parts += self.block(header, members, 4, name)
        return parts
