"""A builder of Sphinx that writes what the site's search reads, ``searchindex.js`` and the scripts, and no pages.

It reads and resolves everything, as the builder "html" does, which takes twice as long.
"""

from __future__ import annotations

import functools
import gc
from pathlib import Path

import sphinx.search
from docutils.utils import new_document
from sphinx.builders.dummy import DummyBuilder


class SearchIndexBuilder(DummyBuilder):
    name = "searchindex"
    allow_parallel = False

    def prepare_writing(self, docnames):
        self.indexer = sphinx.search.IndexBuilder(self.env, "en", {}, self.config.html_search_scorer)
        self.indexer.lang.stem = functools.cache(self.indexer.lang.stem)  # pages have most of their words in common

    def write_doc(self, docname, doctree):
        left_out = "nosearch" in self.env.metadata[docname]
        title = "" if left_out else self.env.longtitles[docname].astext()
        self.indexer.feed(docname, f"{docname}.md", title, new_document("") if left_out else doctree)

    def finish(self):
        folder = Path(self.outdir)
        with (folder / "searchindex.js").open("w", encoding="utf-8") as file:
            self.indexer.dump(file, sphinx.search.js_index)
        words = self.indexer.context_for_searchtool()
        said = f"window.stopwords = new Set({words['search_language_stop_words']});\n"
        tools = Path(sphinx.__file__).parent / "themes" / "basic" / "static" / "searchtools.js"
        parts = [said, words["search_language_stemming_code"], words["search_scorer_tool"], tools.read_text()]
        (folder / "search.js").write_text("\n".join(parts))


def setup(app):
    gc.disable()  # the collector would go over the nodes of all pages again and again; the process ends with the build
    app.add_builder(SearchIndexBuilder)
