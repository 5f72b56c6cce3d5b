// What the instruments compute: the formulas of benchmarks/roofline.py and benchmarks/speculation.py. A test gives both
// the same inputs and compares.

/** What a decode step of a model reads and computes. Parameters: of the blocks' `matrices`, which may have fewer than 16
 * bits, and `others`, norms and head. Numbers that each `row` reads for itself, an embedding's where it is not the head, and
 * of its keys and values (`key`) for each token that it sees. Operations of its `products` with weights, and of `attention`
 * for each token that it sees.
 * @typedef {{matrices: number, others: number, row: number, key: number, products: number, attention: number}} Work */
/** @typedef {{bytes: number, operations: number}} Machine What it reads and computes in a second. */
/** @typedef {{bits: number, context: number}} Setting Bits of a weight, and tokens that each row sees. */
/** @typedef {{weights: number, bytes: number, operations: number, reading: number, multiplying: number, seconds: number}} Floor */
/** @typedef {{work: Work, machine: Machine, acceptance: number, drafts: number, cost: number, requests: number}} Guesses */

const Formulas = {
  /** The least that a step can take: for the longer of reading and multiplying.
   * @param {Work} work @param {Machine} machine @param {Setting} setting @param {number} rows @returns {Floor} */
  floor(work, machine, { bits, context }, rows) {
    const wide = Math.max(bits, 16) / 8; // bytes of whatever is no matrix
    const weights = Math.floor((work.matrices * bits) / 8) + work.others * wide;
    const bytes = weights + rows * (work.row + work.key * context) * wide;
    const operations = rows * (work.products + work.attention * context);
    const [reading, multiplying] = [bytes / machine.bytes, operations / machine.operations];
    return { weights, bytes, operations, reading, multiplying, seconds: Math.max(reading, multiplying) };
  },

  /** The fewest rows that wait for arithmetic; null: each row's keys and values take longer than its arithmetic.
   * @param {Work} work @param {Machine} machine @param {Setting} setting */
  turningRows(work, machine, setting) {
    const [none, one] = [0, 1].map((rows) => Formulas.floor(work, machine, setting, rows));
    const perRow = one.multiplying - (one.bytes - none.bytes) / machine.bytes;
    return perRow > 0 ? Math.max(1, Math.floor(none.reading / perRow) + 1) : null;
  },

  /** Tokens of a step with so many drafts, each accepted with this probability if those before it are.
   * @param {number} acceptance @param {number} drafts */
  expectedTokens(acceptance, drafts) {
    return Array.from({ length: drafts + 1 }, (_, n) => acceptance ** n).reduce((sum, chance) => sum + chance);
  },

  /** The time of a step's rows, in plain steps: a row for each draft and one more. @param {Guesses} guesses */
  stretch({ work, machine, drafts, requests }) {
    const [longer, plain] = [requests * (drafts + 1), requests].map(
      (rows) => Formulas.floor(work, machine, { bits: 16, context: 0 }, rows).seconds,
    );
    return longer / plain;
  },

  /** @param {Guesses} guesses The time of a step with its drafts, in plain steps. */
  stepTime(guesses) {
    return Formulas.stretch(guesses) + guesses.cost * guesses.drafts;
  },

  /** @param {Guesses} guesses The speed-up over plain steps. */
  gain(guesses) {
    return Formulas.expectedTokens(guesses.acceptance, guesses.drafts) / Formulas.stepTime(guesses);
  },

  /** @param {Guesses} guesses The number of drafts, up to `longest`, with the largest gain. @param {number} longest */
  bestLength(guesses, longest) {
    const gains = Array.from({ length: longest + 1 }, (_, drafts) => Formulas.gain({ ...guesses, drafts }));
    return gains.indexOf(Math.max(...gains));
  },

  /** @param {Guesses} guesses The fewest requests with which drafts lose, up to `most`; or null. @param {number} most */
  losesFrom(guesses, most) {
    for (let requests = 1; requests <= most; requests++) if (Formulas.gain({ ...guesses, requests }) < 1) return requests;
    return null;
  },

  /** @param {Guesses} guesses The least acceptance, in whole per cents, with which drafts do not lose; or null. */
  breaksEvenAt(guesses) {
    const losses = Array.from({ length: 101 }, (_, percent) => Formulas.gain({ ...guesses, acceptance: percent / 100 }) < 1);
    return losses.includes(false) ? losses.indexOf(false) : null;
  },

  /** How many of a step's drafts a lot from 0 to 1 accepts.
   * @param {number} lot @param {number} acceptance @param {number} drafts */
  numAccepted(lot, acceptance, drafts) {
    let [accepted, chance] = [0, acceptance];
    while (accepted < drafts && lot < chance) [accepted, chance] = [accepted + 1, chance * acceptance];
    return accepted;
  },
};
