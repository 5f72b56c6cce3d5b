// Names and colours of requests, constant while a request exists; up to eight requests have distinct colours. A classic
// script, loaded before pool.js.
"use strict";

/** @typedef {Map<string, {name: string, colour: number}>} Cast By the ids of requests. */

class PoolCast {
  static COLOURS = 8; // distinguishable with colour blindness (Okabe and Ito); more requests are told apart by name

  /** @param {(id: string, number: number) => string} nameOf */
  constructor(nameOf = (_, number) => String(number)) {
    this.nameOf = nameOf;
    this.known = /** @type {Cast} */ (new Map());
    this.number = 0;
  }

  /** @param {string[]} ids Of the requests that there are. */
  meet(ids) {
    for (const id of this.known.keys()) if (!ids.includes(id)) this.known.delete(id);
    for (const id of ids.filter((each) => !this.known.has(each))) {
      const uses = Array.from({ length: PoolCast.COLOURS }, () => 0);
      for (const { colour } of this.known.values()) uses[colour] += 1;
      const order = uses.map((_, next) => (this.number + next) % PoolCast.COLOURS);
      const colour = order.reduce((best, next) => (uses[next] < uses[best] ? next : best));
      this.number += 1;
      this.known.set(id, { name: this.nameOf(id, this.number), colour });
    }
    return this.known;
  }
}
