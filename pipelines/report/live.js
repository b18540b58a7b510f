/* Follows the workspace: asks for the page again, and replaces the sections that have changed. */

const EVERY = 2000;
const FOCUSED = "a, button, input, select, summary";
let tag = null;
const before = new Map(all(".live").map((part) => [part.id, part.outerHTML]));  // as sent, without what scripts add

/* What a reader has done to a section, and the same done to another one. */
function state(part) {
  return {
    open: all("details", part).map((one) => one.open),
    sorted: all("table.sortable", part).map((table) => {
      const header = all("thead th", table).find((one) => one.hasAttribute("aria-sort"));
      return header && [header.cellIndex, header.getAttribute("aria-sort")];
    }),
    filters: all(".tools :is(input, select)", part).map((one) => one.value),
    focused: all(FOCUSED, part).indexOf(document.activeElement),
  };
}

function restore(part, { open, sorted, filters, focused }) {
  all("details", part).forEach((one, at) => { one.open = open[at] ?? false; });
  all("table.sortable", part).forEach((table, at) => {
    const [column, order] = sorted[at] ?? [], header = all("thead th", table)[column];
    for (let tries = 0; header && tries < 2 && header.getAttribute("aria-sort") !== order; tries++)
      header.querySelector("button").click();
  });
  const inputs = all(".tools :is(input, select)", part);
  if (inputs.length === filters.length) inputs.forEach((one, at) => {
    if (one.value === filters[at]) return;
    one.value = filters[at];
    one.dispatchEvent(new Event("input", { bubbles: true }));
  });
  if (focused >= 0) all(FOCUSED, part)[focused]?.focus({ preventScroll: true });
}

/* Take over the sections of another version of the page; one whose replay is open stays until that is closed. */
function update(page) {
  let waits = false, last = null;
  const parts = all(".live", page), ids = new Set(parts.map((part) => part.id));
  for (const part of all(".live")) if (!ids.has(part.id)) { part.remove(); before.delete(part.id); }
  for (const part of parts) {
    const now = document.getElementById(part.id), sent = part.outerHTML;
    if (now && before.get(part.id) === sent) { last = now; continue; }
    if (now?.querySelector(".player:not([hidden])")) { [waits, last] = [true, now]; continue; }
    before.set(part.id, sent);
    const found = now && state(now);
    if (now) now.replaceWith(part);
    else if (last?.closest("main")) last.after(part);
    else document.querySelector("main").prepend(part);
    enliven(part);
    if (found) restore(part, found);
    last = part;
  }
  return !waits;
}

async function follow() {
  const said = document.getElementById("following");
  try {
    const response = await fetch("/", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (response.status !== 304) {
      if (!response.ok) throw new Error(`status ${response.status}`);
      if (update(new DOMParser().parseFromString(await response.text(), "text/html"))) tag = response.headers.get("ETag");
      said.textContent = `Following the workspace: last change seen at ${new Date().toLocaleTimeString()}`;
      said.classList.remove("alarm");
    } else if (said.classList.contains("alarm")) {
      said.textContent = "Following the workspace again";
      said.classList.remove("alarm");
    }
  } catch {
    said.textContent = "The server of this page does not respond: what is shown is its last state.";
    said.classList.add("alarm");
  }
}

setInterval(() => { if (!document.hidden) follow(); }, EVERY);
document.addEventListener("visibilitychange", () => { if (!document.hidden) follow(); });
