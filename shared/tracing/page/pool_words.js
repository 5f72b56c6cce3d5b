// What is said of a KV cache's blocks: figures, labels, notes, and a sentence for each square. No part of the page is
// touched here. A classic script, loaded after pool_blocks.js and before pool.js.

const PoolWords = (() => {
  "use strict";
  const { SHARED, CACHED } = PoolBlocks;
  const MOST_NAMED = 24;
  const STATES = {
    prefill: "prompt just computed",
    decode: "decoding",
    recompute: "being recomputed",
    preempted: "preempted, waits to be recomputed",
    lost: "leaked: no running request holds it",
  };
  const grouped = (number) => number.toLocaleString("en");
  const some = (number, word) => `${grouped(number)} ${word}${number === 1 ? "" : "s"}`;

  return class PoolWords {
    /** `cast` has the name of each request. */
    constructor(blocks, cast) {
      this.blocks = blocks;
      this.memory = blocks.memory;
      this.unit = blocks.unit;
      this.cast = cast;
    }

    /** Names and values. */
    figures() {
      const { num_blocks: total, block_tokens: size, holdings, num_preemptions: preemptions } = this.memory;
      const { numHeld: held, numShared: shared, cached: { length: cached } } = this.blocks;
      const again = holdings.reduce((sum, { blocks }) => sum + blocks.length, 0) - held; // in a second block table
      const written = holdings.reduce((sum, { num_written: tokens }) => sum + tokens, 0) - again * size;
      return {
        [`${this.unit}s held`]: `${grouped(held)} of ${grouped(total)}`,
        ...(shared || cached ? { shared: grouped(shared), cached: grouped(cached) } : {}),
        free: grouped(total - held - cached),
        "used blocks that are written": held ? `${Math.round((100 * written) / (held * size))} %` : "–",
        preemptions: grouped(preemptions),
      };
    }

    /** The picture in a sentence. */
    label() {
      const { num_blocks: total, holdings } = this.memory;
      const { numHeld: held, cached: { length: cached } } = this.blocks;
      const who = some(holdings.filter(({ blocks }) => blocks.length).length, "request");
      const free = total - held - cached;
      const gone = holdings.filter(({ state }) => state === "preempted").length;
      const more = gone ? `, ${some(gone, "request")} preempted` : "";
      return `${some(held, this.unit)} of ${grouped(total)} held by ${who}, ${cached ? `${cached} cached, ` : ""}${free} free${more}`;
    }

    /** What a square stands for. */
    note() {
      const { isWhole, each, shown } = this.blocks;
      const { num_blocks: total, block_tokens: size } = this.memory;
      return [
        !isWhole && `Only ${this.unit}s in use are drawn, request by request.`,
        each > 1 && `A square stands for ${isWhole ? "" : "up to "}${each} ${this.unit}s${isWhole ? " and is divided among their holders" : ""}.`,
        this.unit === "region"
          ? `A region has room for the longest request there may be, ${some(size, "token")}.`
          : `A block has room for ${some(size, "token")}.`,
        shown < total && `The run never held the other ${some(total - shown, this.unit)}, which are not drawn.`,
      ].filter(Boolean).join(" ");
    }

    /** That nothing is drawn. */
    empty() {
      return this.blocks.cached.length ? "No block is in use." : `All ${some(this.memory.num_blocks, this.unit)} are free.`;
    }

    amount({ state, blocks, num_written: written, num_tokens: tokens, num_cached_tokens: cached }) {
      if (state === "preempted") return `${STATES[state]} (${some(tokens, "token")})`;
      const found = cached ? `, ${grouped(cached)} of them from the cache` : "";
      return `${STATES[state]} · ${some(written, "token")} in ${some(blocks.length, this.unit)}${found}`;
    }

    square({ begin, parts, size, users }) {
      const unit = this.unit[0].toUpperCase() + this.unit.slice(1);
      if (size === 1) {
        for (const [holder, { tokens }] of parts) return `${unit} ${begin}${this.part(holder, users, tokens)}`;
        return `${unit} ${begin} is free.`;
      }
      if (!this.blocks.isWhole) {
        const [[holder, { tokens }]] = parts;
        return `${size} ${this.unit}s${this.part(holder, users, tokens, size)}`;
      }
      const held = [...parts.values()].reduce((sum, { blocks }) => sum + blocks, 0);
      const isNamed = (holder) => holder !== SHARED && holder !== CACHED;
      const who = [...parts].map(([holder, { blocks }]) =>
        isNamed(holder) ? `${this.cast.get(holder.request_id).name} holds ${blocks}` : `${blocks} ${holder}`,
      );
      return `${unit}s ${begin} to ${begin + size - 1}: ${[...who, `${size - held} free`].join(", ")}.`;
    }

    part(holder, users, tokens, blocks = 1) {
      if (holder === CACHED) return " is cached: its prefix is kept until the block is needed.";
      const [[holding, place]] = users;
      if (holder !== SHARED) return `${blocks > 1 ? "," : ":"} ${this.holder(holding, place, tokens, blocks)}`;
      const names = [...users.keys()].map(({ request_id: id }) => this.cast.get(id).name);
      const told = names.length > MOST_NAMED ? [...names.slice(0, MOST_NAMED), "…"] : names;
      return `${blocks > 1 ? "," : ":"} shared by ${some(names.length, "request")} (${told.join(", ")})${this.place(place, blocks, "each")}.`;
    }

    place(place, blocks, whose = "its") {
      const { block_tokens: size } = this.memory;
      return `, ${blocks > 1 ? "from " : ""}place ${place} of ${whose} block table, tokens ${place * size} to ${(place + blocks) * size - 1}`;
    }

    holder(holding, place, tokens, blocks = 1) {
      const { block_tokens: size } = this.memory;
      const { name } = this.cast.get(holding.request_id);
      const id = name === holding.request_id ? "" : ` (${holding.request_id})`;
      const where = this.unit === "region" ? "" : this.place(place, blocks);
      return `request ${name}${id}${where}; ${tokens} of ${blocks * size} written. The request: ${this.amount(holding)}.`;
    }
  };
})();
