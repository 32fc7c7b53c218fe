// The pages that the site's search finds, best first: node search.js FOLDER QUERY ... prints a list for each query, as JSON.
const fs = require("fs");
const vm = require("vm");

const [folder, ...queries] = process.argv.slice(2);
const nothing = () => null;
// What the search's scripts ask of a browser when they are loaded.
const page = { getElementById: nothing, documentElement: { dataset: { content_root: "./" } }, readyState: "complete", addEventListener: nothing };
const browser = { document: page, SPHINX_HIGHLIGHT_ENABLED: false, _ready: nothing, console: { ...console, debug: nothing } };
browser.window = browser;
vm.createContext(browser);
vm.runInContext(fs.readFileSync(`${folder}/search.js`, "utf8") + "\nwindow.Search = Search;", browser);
vm.runInContext(fs.readFileSync(`${folder}/searchindex.js`, "utf8"), browser);

const found = queries.map((query) => browser.Search._performSearch(...browser.Search._parseQuery(query)).reverse());
console.log(JSON.stringify(found.map((results) => results.map(([page]) => page))));
