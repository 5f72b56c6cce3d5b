// The KV cache, live: asks /debug/memory while the panel is in sight, and has it drawn (pool.js).

import { Refusal, complain, field, send } from "./api.js";

const PERIOD = 250; // milliseconds between two looks
const MANY = 10000; // held blocks; with more, looks are rarer in proportion, so that the engine has its time
const FEW = 128; // blocks; a larger pool is shown whole only if the reader wants it
const LINGER = 1000; // milliseconds for which a recomputed request stays marked: a step may be shorter than a look
const RETRY = 2000; // after a failure

const cast = new PoolCast();
const marked = /** @type {Map<string, number>} */ (new Map()); // of recomputed requests, until when
let picture = /** @type {PoolPicture | null} */ (null);
let before = /** @type {Map<string, string>} */ (new Map()); // states at the last look
let shown = "";
let isInSight = false;
let timer = 0;

/** States as they are drawn: a request that was recomputed a moment ago is still marked. @param {Memory} memory @param {number} now */
function withMarks(memory, now) {
  for (const { request_id: id, state, blocks } of memory.holdings) {
    const isBack = before.get(id) === "preempted" && blocks.length;
    if (state === "recompute" || isBack) marked.set(id, now + LINGER);
  }
  before = new Map(memory.holdings.map(({ request_id: id, state }) => [id, state]));
  for (const [id, until] of marked) if (until < now || !before.has(id)) marked.delete(id);
  const drawn = (/** @type {Holding} */ { request_id: id, state }) => (marked.has(id) && state === "decode" ? "recompute" : state);
  return { ...memory, holdings: memory.holdings.map((holding) => ({ ...holding, state: drawn(holding) })) };
}

async function look() {
  clearTimeout(timer);
  if (!isInSight || document.hidden) return;
  let wait = RETRY;
  let trouble = "";
  try {
    const { num_free: free, ...found } = await (await send("debug/memory")).json();
    const memory = withMarks(found, performance.now());
    wait = PERIOD * Math.max(1, (memory.num_blocks - free) / MANY);
    byId("memory").hidden = false;
    byId("memory-whole-label").hidden = memory.num_blocks <= FEW;
    const text = JSON.stringify(memory);
    if (text !== shown) show(memory);
    shown = text;
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) wait = Infinity; // until there is another key
    trouble = wait === Infinity ? "The picture of the KV cache needs the API key." : String(error instanceof Error ? error.message : error);
    byId("memory").hidden = true; // it would show a moment that has passed
  }
  complain("memory-complaint", trouble);
  clearTimeout(timer);
  if (wait !== Infinity) timer = setTimeout(look, wait);
}

/** @param {Memory} memory */
function show(memory) {
  if (!picture) return;
  picture.isWhole = memory.num_blocks <= FEW || field("memory-whole").checked;
  picture.show(memory, cast.meet(memory.holdings.map(({ request_id: id }) => id)));
}

/** Connect the panel. */
export function build() {
  const panel = byId("memory-panel");
  const isFull = () => document.fullscreenElement === panel;
  picture = new PoolPicture(byId("memory"), { height: () => (isFull() ? innerHeight / 2 : 300) });
  new IntersectionObserver((entries) => {
    const [isNow, was] = [entries[entries.length - 1].isIntersecting, isInSight];
    isInSight = isNow;
    if (isNow && !was) look();
  }).observe(panel);
  document.addEventListener("visibilitychange", look);
  byId("key").addEventListener("change", look);
  byId("memory-whole").addEventListener("change", () => picture?.blocks && show(picture.blocks.memory));
  byId("memory-full").addEventListener("click", () => (isFull() ? document.exitFullscreen() : panel.requestFullscreen()));
}
