// How the search ranks what it finds: Sphinx's scores, and among equal ones the how-to pages come first.
var Scorer = {
  score: ([page, title, anchor, text, score]) => (page.startsWith("docs/how-to/") ? score + 3 : score),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
