"""The Chinese pages have the commands, code, output and figures of the English ones."""

import re
from collections import Counter
from pathlib import Path

import pytest

FENCE = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#]*)(#[^)]*)?\)")
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)*%?")
CODE = re.compile(r"`[^`\n]+`")
TUTORIALS = ("first-fine-tuning", "first-grpo", "from-python")
PAGES = {"README.md": "README_CN.md"} | {f"docs/tutorials/{name}.md": f"docs/zh/{name}.md" for name in TUTORIALS}


def read(page):
    return Path(page).read_text(encoding="utf-8")


def figures(text):
    prose = LINK.sub("]", FENCE.sub("", text))
    return Counter(found.rstrip(",") for found in FIGURE.findall(prose))


def named(text):
    """What the text names in code: options, files, commands; headings and links to pages may differ."""
    return Counter(CODE.findall(LINK.sub("]", FENCE.sub("", text))))


@pytest.mark.parametrize(("english", "chinese"), PAGES.items())
def test_both_say_the_same(english, chinese):
    """If this fails, a page was changed in one language: make the same change in the other."""
    one, other = read(english), read(chinese)
    for number, (ours, theirs) in enumerate(zip(FENCE.findall(one), FENCE.findall(other), strict=True), 1):
        assert theirs == ours, f"{chinese}: code block {number} differs from {english}: copy it from there"
    for what, of in (("figures", figures), ("names in code", named)):
        missing, extra = of(one) - of(other), of(other) - of(one)
        assert not missing and not extra, f"{what}: update {chinese}, which lacks {dict(missing)} and has {dict(extra)}"


@pytest.mark.parametrize("page", PAGES.values())
def test_links_lead_to_files(page):
    for target, _ in LINK.findall(read(page)):
        assert not target or (Path(page).parent / target).exists(), f"{page}: {target}"


def test_the_languages_link_to_each_other():
    assert "(README_CN.md)" in read("README.md") and "(README.md)" in read("README_CN.md")
