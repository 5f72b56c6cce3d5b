// The two ways to ask: a text that goes on, and a conversation. Both stream, and both can be stopped.

import { Refusal, complain, events, field, isStopped, send, servedModel } from "./api.js";
import { clearWalk, drawToken, grammarFields } from "./grammar.js";

/** @typedef {{started: number, first: number, count: number, reason: string}} Progress Times in milliseconds. */

const conversation = /** @type {{role: string, content: string}[]} */ ([]);
let running = /** @type {AbortController | null} */ (null);

function sampling() {
  const body = grammarFields();
  for (const name of ["temperature", "top_p", "repetition_penalty", "max_tokens", "top_k", "seed"]) {
    if (field(name).value !== "") body[name] = Number(field(name).value);
  }
  if (field("stop_text").value) body.stop = [field("stop_text").value];
  return body;
}

/** One element a token, so that "show tokens" can colour them; its id is the element's title.
 * @param {HTMLElement} parent @param {string} text @param {number | null} tokenId */
function append(parent, text, tokenId) {
  const token = make("span", text, parent, "token");
  if (tokenId !== null) token.title = `token ${tokenId}`;
  parent.scrollTop = parent.scrollHeight;
}

function summary(/** @type {Progress} */ { started, first, count, reason }) {
  const now = performance.now();
  const parts = [some(count, "token")];
  if (first) parts.push(`first after ${(first - started).toFixed(0)} ms`);
  if (count > 1) parts.push(`${((1000 * (count - 1)) / Math.max(1, now - first)).toFixed(1)} tokens/s`);
  if (reason) parts.push(reason);
  byId("summary").textContent = parts.join(" · ");
}

/** Send a request and pass each chunk to `show`, which returns how many tokens it brought.
 * @param {string} path @param {string} accept @param {Record<string, any>} body @param {(chunk: any) => number} show */
async function ask(path, accept, body, show) {
  const state = { started: performance.now(), first: 0, count: 0, reason: "" };
  running = new AbortController();
  const { signal } = running;
  complain("complaint", "");
  clearWalk();
  byId("summary").textContent = "waiting for the first token";
  field("run").disabled = true;
  field("stop").disabled = false;
  try {
    const { id: model } = await servedModel();
    const headers = { "Content-Type": "application/json", Accept: accept };
    const response = await send(path, { method: "POST", headers, body: JSON.stringify({ model, ...body }), signal });
    for await (const chunk of events(response)) {
      const added = show(chunk);
      if (chunk.grammar) drawToken(chunk.grammar, chunk.choices[0].text ?? chunk.choices[0].delta.content);
      if (added) state.first ||= performance.now();
      state.count = chunk.usage ? chunk.usage.completion_tokens : state.count + added;
      state.reason = chunk.choices[0]?.finish_reason ?? state.reason;
      summary(state);
    }
  } catch (error) {
    if (isStopped(error)) summary({ ...state, reason: "stopped" });
    else if (error instanceof Refusal && error.status === 401) byId("key").focus(); // what is wrong stands beside the field
    else complain("complaint", error instanceof Error ? error.message : String(error));
    if (!state.count && !isStopped(error)) byId("summary").textContent = "";
  } finally {
    running = null;
    field("run").disabled = false;
    field("stop").disabled = true;
  }
}

/** Completions: the named events, one for each token, which are for those who ask for an event stream. */
async function complete() {
  const answer = byId("answer");
  answer.replaceChildren();
  const prompt = field("prompt").value;
  make("span", prompt, answer, "given");
  await ask("v1/completions", "text/event-stream", { ...sampling(), prompt }, (chunk) => {
    if (typeof chunk.token_id !== "number") return 0;
    append(answer, chunk.choices[0].text, chunk.token_id);
    return 1;
  });
}

/** @param {string} role @param {string} text */
function turn(role, text) {
  const element = make("p", text, byId("turns"), `turn ${role}`);
  byId("turns").scrollTop = byId("turns").scrollHeight;
  return element;
}

async function chat() {
  const text = field("message").value.trim();
  if (!text) return;
  field("message").value = "";
  const question = turn("user", text);
  const answer = turn("assistant", "");
  const system = field("system").value;
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation, { role: "user", content: text }];
  let said = "";
  const body = { ...sampling(), messages, stream: true, stream_options: { include_usage: true } };
  await ask("v1/chat/completions", "*/*", body, (chunk) => {
    const piece = chunk.choices[0]?.delta.content ?? "";
    if (!piece) return 0;
    said += piece;
    append(answer, piece, null);
    byId("turns").scrollTop = byId("turns").scrollHeight;
    return 1;
  });
  if (said) {
    conversation.push({ role: "user", content: text }, { role: "assistant", content: said });
    return;
  }
  for (const element of [question, answer]) element.remove();
  field("message").value ||= text; // to be sent again
}

/** @param {string} kind */
function choose(kind) {
  for (const name of ["complete", "chat"]) {
    byId(`tab-${name}`).setAttribute("aria-selected", String(name === kind));
    byId(`tab-${name}`).tabIndex = name === kind ? 0 : -1;
    byId(`pane-${name}`).hidden = name !== kind;
  }
  for (const element of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll(".chat-only"))) element.hidden = kind !== "chat";
}

const isChat = () => !byId("pane-chat").hidden;

/** Connect the form. */
export function build() {
  for (const [name, other] of [["complete", "chat"], ["chat", "complete"]]) {
    byId(`tab-${name}`).addEventListener("click", () => choose(name));
    byId(`tab-${name}`).addEventListener("keydown", ({ key }) => {
      if (!["ArrowLeft", "ArrowRight"].includes(key)) return;
      choose(other);
      byId(`tab-${other}`).focus();
    });
  }
  for (const name of ["temperature", "top_p", "repetition_penalty"]) {
    byId(name).addEventListener("input", () => (byId(`${name}-value`).textContent = field(name).value));
  }
  byId("playground").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) (isChat() ? chat : complete)();
  });
  byId("playground").addEventListener("keydown", (event) => {
    const sends = event.key === "Enter" && (event.ctrlKey || event.metaKey || (event.target === byId("message") && !event.shiftKey));
    if (!sends) return;
    event.preventDefault();
    /** @type {HTMLFormElement} */ (byId("playground")).requestSubmit();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    conversation.length = 0;
    byId("turns").replaceChildren();
    byId("answer").replaceChildren();
    clearWalk();
    complain("complaint", "");
    byId("summary").textContent = "";
  });
  byId("boundaries").addEventListener("change", () => {
    byId("playground").classList.toggle("boundaries", field("boundaries").checked);
  });
}
