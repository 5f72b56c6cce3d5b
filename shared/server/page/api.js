// Requests to this server: the API key, the served model, and a sentence for each way in which a request can fail.

/** @typedef {{id: string, max_model_len: number}} Model */

/** A control of the page. @param {string} id */
export const field = (id) => /** @type {HTMLInputElement} */ (byId(id));
const givenKey = () => field("key").value.trim().replace(/[^!-~]/g, "?"); // a header carries ASCII
const RUNNING = "Check that infer serve is running";
export const UNREACHABLE = `The server cannot be reached: it was stopped, or the network is down. ${RUNNING}.`;
const CUT_SHORT = `The answer was cut short: the server was stopped, or the network failed. ${RUNNING}, then run it again.`;
const KEYLESS = "The server needs the API key."; // short: the line beside the field never wraps
const WRONG_KEY = "The server refuses this key.";

let asked = /** @type {{key: string, answer: Promise<Model>} | null} */ (null); // what /v1/models said to this key

/** Show an element with this text, or hide it if the text is empty. @param {string} id @param {string} text */
export function complain(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text; // else a screen reader would say it again
  byId(id).hidden = !text;
}

/** @param {string} key @param {boolean} isRefused */
function showKey(key, isRefused) {
  if (key !== givenKey()) return; // the response to an earlier key
  byId("key-row").hidden = !isRefused && !key;
  byId("key").setAttribute("aria-invalid", String(isRefused));
  complain("key-complaint", isRefused ? (key ? WRONG_KEY : KEYLESS) : "");
}

/** An error with a sentence, and the status of the response if there was one. */
export class Refusal extends Error {
  /** @param {string} said @param {number | undefined} status */
  constructor(said, status = undefined) {
    super(said);
    this.status = status;
  }
}

/** Whether the reader has stopped the request. @param {unknown} error */
export const isStopped = (error) => error instanceof DOMException && error.name === "AbortError";

/** The response of the server; raises a Refusal. @param {string} path @param {RequestInit} options */
export async function send(path, options = {}) {
  const key = givenKey();
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw isStopped(error) ? error : new Refusal(UNREACHABLE);
  });
  showKey(key, response.status === 401);
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const said = body?.error?.message ?? `The server answered with status ${response.status} and no reason; see its log.`;
  throw new Refusal(said, response.status);
}

/** Yields the data of each server-sent event; raises a Refusal if the stream ends before its last event.
 * @param {Response} response */
export async function* events(response) {
  const body = /** @type {ReadableStream<Uint8Array<ArrayBuffer>>} */ (response.body);
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Refusal(CUT_SHORT);
      text += value;
      const blocks = text.split("\n\n");
      text = blocks.pop() ?? "";
      for (const block of blocks) {
        const lines = block.split("\n");
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("");
        if (data === "[DONE]") return;
        if (!data) continue; // a comment
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refusal(chunk.error.message);
        yield chunk;
        if (lines.includes("event: done")) return;
      }
    }
  } catch (error) {
    throw error instanceof TypeError ? new Refusal(CUT_SHORT) : error; // TypeError: the connection was lost
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The model that is served, asked for once per key. */
export function servedModel() {
  const key = givenKey();
  if (asked?.key !== key) {
    const answer = send("v1/models").then((response) => response.json()).then(({ data }) => /** @type {Model} */ (data[0]));
    asked = { key, answer };
    answer.catch(forgetModel);
  }
  return asked.answer;
}

/** Ask for the model again: the server may have been restarted with another. */
export function forgetModel() {
  asked = null;
}
