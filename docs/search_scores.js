// How the search ranks what it finds: Sphinx's scores. The how-to pages come first, also before a page of equal words in a heading;
// the long pages, which have most words somewhere, come last.
const LONG_PAGES = ["docs/architecture", "docs/features", "docs/performance", "docs/reliability"];
var Scorer = {
  score: ([page, title, anchor, text, score]) => {
    if (page.startsWith("docs/how-to/")) return score + 3;
    return LONG_PAGES.includes(page) ? score - 8 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
