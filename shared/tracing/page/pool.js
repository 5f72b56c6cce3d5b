// The KV cache as a picture: one square per block, with the colour and name of the request that holds it, filled as far
// as it is written; a block that several requests hold shows their number. A classic script, since two pages use it: the
// server's, and the one that `infer trace` writes. Loaded after the other three of the pool.

const PoolPicture = (() => {
  "use strict";
  const MOST_LISTED = 24;
  const [LEAST, LARGEST, NAMED] = [6, 84, 20]; // pixels of a square; from NAMED on it shows a name
  const USED = [26, 18, 12, LEAST]; // pixels of a square where only used blocks are drawn: the first that fits
  const [BAR, MOST_BARS] = [44, 16]; // of a region: its height, and how many stand in one column
  const { SHARED, CACHED } = PoolBlocks;
  let count = 0;

  const box = (x, y, width, height) => `M${x.toFixed(1)} ${y.toFixed(1)}h${width.toFixed(1)}v${height.toFixed(1)}h${(-width).toFixed(1)}z`;

  return class PoolPicture {
    /**
     * Drawn inside the element; `height` returns the maximum height of the grid in pixels. While `isWhole` is false, only
     * the blocks in use are drawn, those of a request together in the order of its block table.
     */
    constructor(parent, { height = () => 320, label = "KV cache" } = {}) {
      this.id = `pool-${(count += 1)}`;
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
      this.legend(make("ul", "", parent, "pool-legend"));
      this.list = make("ul", "", parent, "pool-list");
      this.list.setAttribute("aria-label", "Who holds it");
      this.frame.addEventListener("pointermove", (event) => this.point(event));
      this.frame.addEventListener("pointerdown", (event) => this.point(event));
      this.frame.addEventListener("pointerleave", () => this.select(undefined));
      this.frame.addEventListener("keydown", (event) => this.move(event));
      this.width = 0;
      new ResizeObserver(() => this.memory && this.frame.clientWidth !== this.width && this.render()).observe(this.frame);
    }

    legend(list) {
      list.setAttribute("aria-label", "Legend");
      for (const [kind, text] of [["free", "free"], ["part", "held, in part written"], ["prefill", "prompt just computed"], ["recompute", "being recomputed"]]) {
        const item = make("li", "", list);
        make("i", "", item, `pool-key ${kind}`);
        item.append(text);
      }
      const prefixes = { [SHARED]: "shared by so many requests", [CACHED]: "cached: a prefix that no request holds" };
      this.prefixKeys = Object.entries(prefixes).map(([kind, text]) => {
        const item = make("li", "", list);
        make("i", kind === SHARED ? "×2" : "", item, `pool-key ${kind}`);
        item.append(text);
        item.hidden = true; // until there are any
        return item;
      });
    }

    /** `memory` is the response of /debug/memory; `cast` knows its requests. */
    show(memory, cast) {
      this.memory = memory;
      this.cast = new Map(cast);
      this.render();
    }

    render() {
      this.width = this.frame.clientWidth;
      this.blocks = new PoolBlocks(this.memory, this.isWhole);
      this.squares = this.blocks.squares;
      this.words = new PoolWords(this.blocks, this.cast);
      this.arrange();
      this.drawGrid();
      this.writeFigures();
      this.writeList();
      this.select(this.at < this.squares.length ? this.at : undefined);
    }

    arrange() {
      const number = this.squares.length;
      if (!this.isWhole) {
        const columns = (side) => Math.max(1, Math.floor(this.width / side));
        const side = USED.find((side) => Math.ceil(number / columns(side)) * side <= this.height()) ?? LEAST;
        this.columns = columns(side) > 8 ? columns(side) - (columns(side) % 8) : columns(side);
        this.cell = [side, side];
        return;
      }
      if (this.blocks.unit === "region" && this.blocks.each === 1) {
        this.columns = Math.ceil(number / MOST_BARS);
        this.cell = [this.width / this.columns, Math.min(BAR, Math.max(14, this.height() / Math.ceil(number / this.columns)))];
        return;
      }
      const side = (columns) => Math.min(LARGEST, this.width / columns, this.height() / Math.ceil(number / columns));
      const widths = Array.from({ length: Math.max(1, Math.floor(this.width / LEAST)) }, (_, width) => width + 1);
      const round = widths.filter((columns) => columns <= Math.max(8, number) && (columns <= 8 || columns % 8 === 0)); // rows begin at round numbers
      this.columns = round.reduce((best, columns) => (side(columns) >= side(best) ? columns : best));
      this.cell = Array(2).fill(Math.max(LEAST, side(this.columns)));
    }

    corner(square) {
      return [(square % this.columns) * this.cell[0], Math.floor(square / this.columns) * this.cell[1]];
    }

    drawGrid() {
      const [width, height] = this.cell;
      const gap = width > 12 ? 3 : 1;
      const [wide, high] = [width - gap, height - gap];
      const rows = Math.ceil(this.squares.length / this.columns);
      const svg = draw("svg", { "aria-hidden": true });
      svg.style.width = `${this.columns * width}px`;
      svg.style.height = `${rows * height}px`;
      this.patterns(svg);
      const paths = new Map([...this.memory.holdings, SHARED, CACHED].map((holder) => [holder, { held: "", written: "" }]));
      const labels = [];
      let grid = "";
      this.squares.forEach(({ size, parts, users }, square) => {
        const [x, y] = this.corner(square);
        grid += box(x, y, wide, high);
        let left = x;
        for (const [holder, { blocks, tokens }] of parts) {
          const share = (wide * blocks) / size;
          paths.get(holder).held += box(left, y, share, high);
          paths.get(holder).written += box(left, y, (wide * tokens) / (size * this.memory.block_tokens), high);
          left += share;
          if (this.blocks.each === 1 && height >= NAMED && holder !== CACHED) labels.push([users, x + wide / 2, y + high / 2]);
        }
      });
      draw("path", { class: "pool-free", d: grid }, svg);
      for (const [holder, { held, written }] of paths) {
        if (!held) continue;
        const { request_id: id, state } = holder;
        const about = id === undefined ? {} : { "data-holder": id, "data-state": state };
        const group = draw("g", { class: `pool-holder ${this.look(holder)}`, ...about }, svg);
        draw("path", { class: "pool-held", d: held }, group);
        draw("path", { class: "pool-written", d: written }, group);
        const pattern = { recompute: "hatch", prefill: "dots" }[state];
        if (pattern) draw("path", { class: "pool-over", fill: `url(#${this.id}-${pattern})`, d: held }, group);
        draw("path", { class: "pool-edge", d: held }, group);
      }
      this.labels = labels.map(([users, x, y]) => {
        const holder = this.blocks.holder(users);
        const name = holder === SHARED ? `×${users.size}` : this.cast.get(holder.request_id).name;
        const size = Math.min(22, Math.max(11, height * 0.42));
        const label = draw("text", { class: `pool-name ${this.look(holder)}`, x, y }, svg);
        label.style.fontSize = `${size}px`;
        label.textContent = name.length * size * 0.6 < wide ? name : "";
        return { label, users, name: label.textContent };
      });
      this.cursor = draw("path", { class: "pool-cursor", d: "" }, svg);
      this.frame.replaceChildren(svg);
      if (!this.squares.length) make("p", this.words.empty(), this.frame, "pool-empty");
    }

    look(holder) {
      return holder === SHARED || holder === CACHED ? holder : `colour-${this.cast.get(holder.request_id).colour}`;
    }

    patterns(svg) {
      const defs = draw("defs", {}, svg);
      const hatch = draw("pattern", { id: `${this.id}-hatch`, width: 8, height: 8, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, defs);
      draw("rect", { class: "pool-line", width: 3, height: 8 }, hatch);
      const dots = draw("pattern", { id: `${this.id}-dots`, width: 7, height: 7, patternUnits: "userSpaceOnUse" }, defs);
      draw("circle", { class: "pool-line", cx: 2, cy: 2, r: 1.3 }, dots);
    }

    writeFigures() {
      const kinds = [this.blocks.numShared, this.blocks.cached.length];
      kinds.forEach((number, place) => number && (this.prefixKeys[place].hidden = false));
      this.figures.replaceChildren();
      for (const [name, value] of Object.entries(this.words.figures())) {
        const row = make("div", "", this.figures);
        make("dt", name, row);
        make("dd", value, row);
      }
      const keys = "arrow keys go through the squares, the list below has the same";
      this.frame.setAttribute("aria-label", `${this.label}: ${this.words.label()}; ${keys}`);
      this.note.textContent = this.words.note();
    }

    writeList() {
      const { holdings, num_waiting: waiting } = this.memory;
      this.list.replaceChildren();
      for (const holding of holdings.slice(0, MOST_LISTED)) {
        const { name, colour } = this.cast.get(holding.request_id);
        const item = make("li", "", this.list);
        item.dataset.holder = holding.request_id;
        item.dataset.state = holding.state;
        make("i", name, item, `pool-swatch colour-${colour} ${holding.state}`);
        make("span", this.words.amount(holding), item);
        item.title = holding.request_id;
      }
      const rest = holdings.length - MOST_LISTED;
      if (rest > 0) make("li", `and ${rest} more`, this.list);
      const fresh = waiting - holdings.filter(({ state }) => state === "preempted").length;
      if (fresh > 0) make("li", `${fresh.toLocaleString("en")} more in the queue`, this.list);
      if (!this.list.childElementCount) make("li", "no block is in use", this.list);
    }

    point(event) {
      const [x, y] = [event.clientX, event.clientY].map((at, side) => at - this.frame.getBoundingClientRect()[side ? "y" : "x"]);
      const column = Math.floor(x / this.cell[0]);
      const square = Math.floor(y / this.cell[1]) * this.columns + column;
      this.select(column < this.columns && this.squares[square] ? square : undefined);
    }

    move(event) {
      const way = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[event.key];
      if (!way || !this.memory) return;
      event.preventDefault();
      const next = this.at === undefined ? 0 : this.at + way;
      if (this.squares[next]) this.select(next);
    }

    /** The selected square; all squares of its request, or requests, are framed and show their index in its block table. */
    select(square) {
      this.at = square;
      const { users = new Map(), size } = this.squares[square] ?? {};
      const chosen = [...users.keys()].slice(0, size === 1 ? users.size : 1);
      const placeIn = (users) => users.get(chosen.find((user) => users.has(user)));
      const [width, height] = this.cell.map((side) => side - (this.cell[0] > 12 ? 3 : 1));
      const framed = this.squares.flatMap(({ users }, at) => (at === square || placeIn(users) !== undefined ? [at] : []));
      const frames = square === undefined ? [] : framed.map((at) => box(...this.corner(at), width, height));
      this.cursor.setAttribute("d", frames.join(""));
      for (const { label, users, name } of this.labels) label.textContent = placeIn(users) === undefined ? name : `[${placeIn(users)}]`;
      this.told.textContent = square === undefined ? "Point at a square, or move with the arrow keys." : this.words.square(this.squares[square]);
    }
  };
})();
