// The blocks of a KV cache as squares: which requests hold each, and how much of it is written. No part of the page is
// touched here. A classic script, loaded before pool_words.js and pool.js.
"use strict";

/** @typedef {{request_id: string, state: string, num_tokens: number, num_written: number, num_cached_tokens: number,
 *   blocks: number[]}} Holding */
/** @typedef {{unit: string, block_tokens: number, num_blocks: number, num_shown?: number, num_waiting: number,
 *   num_preemptions: number, holdings: Holding[], cached?: number[]}} Memory The response of /debug/memory. */
/** @typedef {Map<Holding, number>} Users The requests that hold a block, each with the block's index in its table. */
/** @typedef {Holding | "shared" | "cached"} Holder Several requests share a block; no request holds a cached one. */
/** @typedef {{begin: number, size: number, parts: Map<Holder, {blocks: number, tokens: number}>, users: Users}} Square */

class PoolBlocks {
  static MOST_SQUARES = 1024;

  /** If not `isWhole`, the squares are those of the blocks in use alone. @param {Memory} memory @param {boolean} isWhole */
  constructor(memory, isWhole) {
    this.memory = memory;
    this.isWhole = isWhole;
    this.unit = memory.unit;
    this.cached = memory.cached ?? [];
    this.shown = memory.num_shown ?? memory.num_blocks; // all, or those up to the last that a recorded run ever held
    this.users = /** @type {Map<number, Users>} */ (new Map());
    for (const holding of memory.holdings) {
      for (const [index, block] of holding.blocks.entries()) {
        this.users.set(block, (this.users.get(block) ?? new Map()).set(holding, index));
      }
    }
    this.numHeld = this.users.size;
    this.numShared = [...this.users.values()].filter((users) => users.size > 1).length;
    this.each = Math.max(1, Math.ceil((isWhole ? this.shown : this.numHeld) / PoolBlocks.MOST_SQUARES)); // blocks of a square
    this.squares = isWhole ? this.whole() : this.used();
  }

  /** Squares of all blocks. */
  whole() {
    const { each, shown } = this;
    const squares = Array.from({ length: Math.ceil(shown / each) }, (_, square) => /** @type {Square} */ ({
      begin: square * each, size: Math.min(each, shown - square * each), parts: new Map(), users: new Map(),
    }));
    for (const [block, users] of this.users) this.add(squares[Math.floor(block / each)], users);
    for (const block of this.cached) this.count(squares[Math.floor(block / each)], "cached", this.memory.block_tokens);
    return squares;
  }

  /** Squares of the blocks in use; a shared block is drawn with the first of its requests. */
  used() {
    return this.memory.holdings.flatMap((holding) => {
      const squares = /** @type {Square[]} */ ([]);
      for (const block of holding.blocks) {
        const users = this.users.get(block) ?? new Map();
        if (users.keys().next().value !== holding) continue;
        const isNext = squares.at(-1)?.parts.has(this.holder(users)) && squares[squares.length - 1].size < this.each;
        if (!isNext) squares.push({ begin: block, size: 0, parts: new Map(), users: new Map() });
        squares[squares.length - 1].size += 1;
        this.add(squares[squares.length - 1], users);
      }
      return squares;
    });
  }

  /** @param {Users} users @returns {Holder} */
  holder(users) {
    return users.size > 1 ? "shared" : [...users.keys()][0];
  }

  /** @param {Square} square @param {Users} users */
  add(square, users) {
    const { block_tokens: size } = this.memory;
    const [[holding, index]] = users;
    this.count(square, this.holder(users), Math.min(size, Math.max(0, holding.num_written - index * size)));
    for (const [user, at] of users) if (!square.users.has(user)) square.users.set(user, at);
  }

  /** @param {Square} square @param {Holder} holder @param {number} written */
  count({ parts }, holder, written) {
    const { blocks, tokens } = parts.get(holder) ?? { blocks: 0, tokens: 0 };
    parts.set(holder, { blocks: blocks + 1, tokens: tokens + written });
  }
}
