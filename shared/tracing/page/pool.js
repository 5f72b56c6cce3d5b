// The KV cache as a picture: one square per block, with the colour and name of the request that holds it, filled as far
// as it is written; a block that several requests hold shows their number. A classic script, since two pages use it: the
// server's, and the one that `infer trace` writes. Loaded after the other three of the pool.
"use strict";

const SQUARE = { least: 6, largest: 84, named: 20 }; // pixels of a side; from `named` on a square shows a name
const USED_SIDES = [26, 18, 12, SQUARE.least]; // of squares where only used blocks are drawn: the first that fits
const [BAR, MOST_BARS] = [44, 16]; // of a region: its height, and how many stand in one column
const MOST_LISTED = 24;

/** @param {number} x @param {number} y @param {number} width @param {number} height */
const box = (x, y, width, height) => `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}h${(-width).toFixed(1)}z`;

class PoolPicture {
  static count = 0;
  width = 0;
  columns = 1;
  cell = [0, 0];
  cast = /** @type {Cast} */ (new Map());
  at = /** @type {number | undefined} */ (undefined); // the selected square
  labels = /** @type {{label: Element, users: Users, name: string}[]} */ ([]);

  /** Drawn inside the element; `height` returns the maximum height of the grid in pixels. While `isWhole` is false, only
   * the blocks in use are drawn, those of a request together in the order of its block table.
   * @param {HTMLElement} parent @param {{height?: () => number, label?: string}} options */
  constructor(parent, { height = () => 320, label = "KV cache" }) {
    this.id = `pool-${(PoolPicture.count += 1)}`;
    this.height = height;
    this.label = label;
    this.isWhole = true;
    parent.classList.add("pool");
    this.figures = make("dl", "", parent, "pool-figures");
    this.frame = make("div", "", parent, "pool-frame");
    this.frame.tabIndex = 0;
    this.frame.setAttribute("role", "application");
    this.note = make("p", "", parent, "pool-note");
    this.told = make("output", "", parent, "pool-told");
    this.told.id = `${this.id}-told`;
    this.told.setAttribute("aria-live", "polite");
    this.frame.setAttribute("aria-describedby", this.told.id);
    this.prefixKeys = this.legend(make("ul", "", parent, "pool-legend"));
    this.list = make("ul", "", parent, "pool-list");
    this.list.setAttribute("aria-label", "The requests that hold it");
    for (const kind of /** @type {const} */ (["pointermove", "pointerdown"])) this.frame.addEventListener(kind, (event) => this.point(event));
    this.frame.addEventListener("pointerleave", () => this.select(undefined));
    this.frame.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.blocks && this.frame.clientWidth !== this.width && this.show(this.blocks.memory, this.cast)).observe(this.frame);
  }

  /** The keys of shared and of cached blocks are returned, hidden until there are any. @param {HTMLElement} list */
  legend(list) {
    list.setAttribute("aria-label", "Legend");
    const held = { free: "free", part: "held, partly written", prefill: "prompt just computed", recompute: "being recomputed" };
    const prefixes = { shared: "shared by this many requests", cached: "cached: a prefix that no request holds" };
    const keys = Object.entries({ ...held, ...prefixes }).map(([kind, text]) => {
      const item = make("li", "", list);
      make("i", kind === "shared" ? "×2" : "", item, `pool-key ${kind}`);
      item.append(text);
      return item;
    });
    for (const key of keys.slice(-2)) key.hidden = true;
    return keys.slice(-2);
  }

  /** @param {Memory} memory @param {Cast} cast Knows its requests. */
  show(memory, cast) {
    this.cast = new Map(cast);
    this.width = this.frame.clientWidth;
    this.blocks = new PoolBlocks(memory, this.isWhole);
    this.words = new PoolWords(this.blocks, this.cast);
    this.arrange(this.blocks);
    this.drawGrid(this.blocks);
    this.tell(this.blocks, this.words);
    this.select(this.at);
  }

  arrange(/** @type {PoolBlocks} */ { squares: { length: number }, unit, each }) {
    const rows = (/** @type {number} */ columns) => Math.ceil(number / columns);
    if (!this.isWhole) {
      const columns = (/** @type {number} */ side) => Math.max(1, Math.floor(this.width / side));
      const side = USED_SIDES.find((side) => rows(columns(side)) * side <= this.height()) ?? SQUARE.least;
      this.columns = columns(side) > 8 ? columns(side) - (columns(side) % 8) : columns(side);
      this.cell = [side, side];
    } else if (unit === "region" && each === 1) {
      this.columns = rows(MOST_BARS);
      this.cell = [this.width / this.columns, Math.min(BAR, Math.max(14, this.height() / rows(this.columns)))];
    } else {
      const side = (/** @type {number} */ columns) => Math.min(SQUARE.largest, this.width / columns, this.height() / rows(columns));
      const widths = Array.from({ length: Math.max(1, Math.floor(this.width / SQUARE.least)) }, (_, width) => width + 1);
      const round = widths.filter((columns) => columns <= Math.max(8, number) && (columns <= 8 || columns % 8 === 0)); // rows begin at round numbers
      this.columns = round.reduce((best, columns) => (side(columns) >= side(best) ? columns : best));
      this.cell = Array(2).fill(Math.max(SQUARE.least, side(this.columns)));
    }
  }

  /** Left, top, width and height of a square. @param {number} square @returns {[number, number, number, number]} */
  bounds(square) {
    const [width, height] = this.cell;
    const gap = width > 12 ? 3 : 1;
    return [(square % this.columns) * width, Math.floor(square / this.columns) * height, width - gap, height - gap];
  }

  drawGrid(/** @type {PoolBlocks} */ blocks) {
    const { memory, squares, each } = blocks;
    const svg = /** @type {SVGElement} */ (draw("svg", { "aria-hidden": true }));
    svg.style.width = `${this.columns * this.cell[0]}px`;
    svg.style.height = `${Math.ceil(squares.length / this.columns) * this.cell[1]}px`;
    this.patterns(svg);
    const paths = new Map(/** @type {Holder[]} */ ([...memory.holdings, "shared", "cached"]).map((holder) => [holder, { held: "", written: "" }]));
    const labels = /** @type {[Users, number][]} */ ([]);
    squares.forEach(({ size, parts, users }, square) => {
      let [left, y, width, height] = this.bounds(square);
      for (const [holder, { blocks, tokens }] of parts) {
        const path = paths.get(holder) ?? { held: "", written: "" };
        path.held += box(left, y, (width * blocks) / size, height);
        path.written += box(left, y, (width * tokens) / (size * memory.block_tokens), height);
        left += (width * blocks) / size;
        if (each === 1 && this.cell[1] >= SQUARE.named && holder !== "cached") labels.push([users, square]);
      }
    });
    draw("path", { class: "pool-free", d: squares.map((_, square) => box(...this.bounds(square))).join("") }, svg);
    for (const [holder, { held, written }] of paths) {
      if (!held) continue;
      const { request_id: id, state } = typeof holder === "string" ? { request_id: "", state: "" } : holder;
      const group = draw("g", { class: `pool-holder ${this.look(holder)}`, ...(id && { "data-holder": id, "data-state": state }) }, svg);
      draw("path", { class: "pool-held", d: held }, group);
      draw("path", { class: "pool-written", d: written }, group);
      const pattern = { recompute: "hatch", prefill: "dots" }[state];
      if (pattern) draw("path", { class: "pool-over", fill: `url(#${this.id}-${pattern})`, d: held }, group);
      draw("path", { class: "pool-edge", d: held }, group);
    }
    this.labels = labels.map(([users, square]) => {
      const [x, y, width, height] = this.bounds(square);
      const holder = blocks.holder(users);
      const size = Math.min(22, Math.max(11, this.cell[1] * 0.42));
      const label = draw("text", { class: `pool-name ${this.look(holder)}`, x: x + width / 2, y: y + height / 2 }, svg);
      /** @type {SVGElement} */ (label).style.fontSize = `${size}px`;
      const name = typeof holder === "string" ? `×${users.size}` : (this.cast.get(holder.request_id)?.name ?? "");
      return { label, users, name: name.length * size * 0.6 < width ? name : "" };
    });
    this.cursor = draw("path", { class: "pool-cursor", d: "" }, svg);
    this.frame.replaceChildren(svg);
  }

  look(/** @type {Holder} */ holder) {
    return typeof holder === "string" ? holder : `colour-${this.cast.get(holder.request_id)?.colour}`;
  }

  patterns(/** @type {Element} */ svg) {
    const defs = draw("defs", {}, svg);
    const hatch = draw("pattern", { id: `${this.id}-hatch`, width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, defs);
    draw("rect", { class: "pool-line", width: 3, height: 8 }, hatch);
    const dots = draw("pattern", { id: `${this.id}-dots`, width: 7, height: 7, patternUnits: "userSpaceOnUse" }, defs);
    draw("circle", { class: "pool-line", cx: 2, cy: 2, r: 1.3 }, dots);
  }

  /** The figures, the note and the list of requests. @param {PoolBlocks} blocks @param {PoolWords} words */
  tell({ memory, squares, numShared, cached }, words) {
    [numShared, cached.length].forEach((number, index) => number && (this.prefixKeys[index].hidden = false));
    this.figures.replaceChildren();
    for (const [name, value] of Object.entries(words.figures())) {
      const row = make("div", "", this.figures);
      make("dt", name, row);
      make("dd", value, row);
    }
    const keys = "arrow keys go through the squares, the list below has the same";
    this.frame.setAttribute("aria-label", `${this.label}: ${words.label()}; ${keys}`);
    if (!squares.length) make("p", words.empty(), this.frame, "pool-empty");
    this.note.textContent = words.note();
    this.list.replaceChildren();
    for (const holding of memory.holdings.slice(0, MOST_LISTED)) {
      const item = make("li", "", this.list);
      Object.assign(item.dataset, { holder: holding.request_id, state: holding.state });
      make("i", words.name(holding), item, `pool-swatch ${this.look(holding)} ${holding.state}`);
      make("span", words.amount(holding), item);
      item.title = holding.request_id;
    }
    const rest = memory.holdings.length - MOST_LISTED;
    if (rest > 0) make("li", `and ${rest} more`, this.list);
    const fresh = memory.num_waiting - memory.holdings.filter(({ state }) => state === "preempted").length;
    if (fresh > 0) make("li", `${grouped(fresh)} more in the queue`, this.list);
    if (!this.list.childElementCount) make("li", "no block is in use", this.list);
  }

  point(/** @type {PointerEvent} */ event) {
    const { x, y } = this.frame.getBoundingClientRect();
    const column = Math.floor((event.clientX - x) / this.cell[0]);
    const square = Math.floor((event.clientY - y) / this.cell[1]) * this.columns + column;
    this.select(column < this.columns ? square : undefined);
  }

  move(/** @type {KeyboardEvent} */ event) {
    const ways = /** @type {Record<string, number>} */ ({ ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns });
    if (!(event.key in ways)) return;
    event.preventDefault();
    const next = this.at === undefined ? 0 : this.at + ways[event.key];
    if (this.blocks?.squares[next]) this.select(next);
  }

  /** All squares of its request, or requests, are framed and show their index in its block table.
   * @param {number | undefined} square */
  select(square) {
    const { squares = [] } = this.blocks ?? {};
    const selected = squares[square ?? -1];
    this.at = selected && square;
    const { users, size } = selected ?? { users: /** @type {Users} */ (new Map()), size: 0 };
    const chosen = [...users.keys()].slice(0, size === 1 ? users.size : 1);
    const indexIn = (/** @type {Users} */ all) => chosen.map((user) => all.get(user)).find((index) => index !== undefined);
    const framed = squares.flatMap(({ users: all }, at) => (at === this.at || indexIn(all) !== undefined ? [at] : []));
    this.cursor?.setAttribute("d", framed.map((at) => box(...this.bounds(at))).join(""));
    for (const { label, users: all, name } of this.labels) label.textContent = indexIn(all) === undefined ? name : `[${indexIn(all)}]`;
    this.told.textContent = selected && this.words ? this.words.square(selected) : "Point at a square, or move with the arrow keys.";
  }
}
