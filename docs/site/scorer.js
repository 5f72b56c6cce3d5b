// The order of what a search finds: titles that hold all that was asked for come first, of equals chapters, then other
// pages, then reports. Numbers that Sphinx adds for matches are its own.
const whatIsAsked = () => (new URLSearchParams(location.search).get("q") || "").toLowerCase().trim();

/** What the field calls the subject of a chapter that has another title. @type {Record<string, string>} */
const SUBJECTS = {
  "paged attention": "06", pagedattention: "06", "flash decoding": "06_1", "split-kv": "06_1", "radix attention": "08",
  radixattention: "08", "cuda graph": "09", "cuda graphs": "09", "overlap scheduling": "09", "kv cache compression": "09_2",
  quantization: "10", "speculative sampling": "11", "guided decoding": "12", "constrained decoding": "12",
};

function kindOf(/** @type {string} */ page) {
  if (/^tutorial\/phase_[0-9a-z]+(_\d)?$/.test(page)) return 3;
  return page.startsWith("benchmarks/") ? 1 : 2;
}

var Scorer = {
  /** @param {[page: string, title: string, anchor: string, text: string, score: number]} found */
  score: ([page, title, , , score]) => {
    const asked = whatIsAsked();
    const [own, ...above] = title.toLowerCase().split(" > ").reverse();
    const isSubject = asked in SUBJECTS && page === `tutorial/phase_${SUBJECTS[asked]}`;
    return score + (isSubject ? 1000 : 0) + kindOf(page) * (own.includes(asked) ? (above.length ? 50 : 100) : 1);
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
