"use strict";
/* Sorts and filters tables, and replays responses at their measured pace or slower. Nothing plays until it is asked to. */

const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

function sortable(table) {
  const headers = all("thead th", table), rows = all("tbody tr", table);
  function key(row, column) {
    const text = row.cells[column].textContent.trim();
    return headers[column].classList.contains("n") ? Number.parseFloat(text.replaceAll(",", "")) : text;
  }
  function compare(a, b, sign) {
    if (typeof a === "string") return sign * a.localeCompare(b, "en", { numeric: true });
    return Number.isNaN(a) - Number.isNaN(b) || sign * (a - b) || 0;
  }
  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    const orders = header.classList.contains("n") ? ["descending", "ascending"] : ["ascending", "descending"];
    button.addEventListener("click", () => {
      const order = orders[orders.indexOf(header.getAttribute("aria-sort")) + 1];
      for (const one of headers) one.removeAttribute("aria-sort");
      if (order) header.setAttribute("aria-sort", order);
      const sign = order === "descending" ? -1 : 1;
      const sorted = [...rows];
      if (order) sorted.sort((a, b) => compare(key(a, column), key(b, column), sign));
      table.classList.toggle("sorted", Boolean(order));
      table.tBodies[0].append(...sorted);
    });
  });
  table.classList.add("scripted");
}

function filter(tools) {
  const table = tools.nextElementSibling, rows = all("tbody tr", table), selects = all("select", tools);
  const asked = (row, select) =>
    !select.value || row.querySelector(`[data-label="${select.name}"]`).textContent.trim() === select.value;
  tools.addEventListener("input", () => {
    const name = tools.querySelector("input").value.trim().toLowerCase();
    for (const row of rows)
      row.hidden = !row.cells[0].textContent.toLowerCase().includes(name) || !selects.every((one) => asked(row, one));
    const shown = rows.filter((row) => !row.hidden).length;
    tools.querySelector("[role=status]").textContent = shown < rows.length ? `${shown} of ${rows.length} rows` : "";
  });
  tools.hidden = false;
}

/* Milliseconds that the slower side takes at least, where a slower pace is offered. */
const WATCHED = 4000;

function replay(box) {
  const part = (name) => box.querySelector(`.${name}`);
  const [open, player, choice, pace, play] = ["open", "player", "choice", "pace", "play"].map(part);
  const drafted = all(".drafted", box), plain = all(".plainly", box), status = box.querySelector("[role=status]");
  let runs = [], end = 0, now = 0, last = null, remark = "";

  function choose() {
    const chosen = drafted[choice.selectedIndex], beside = plain[Number(chosen.dataset.plain)];
    for (const one of [...plain, ...drafted]) one.hidden = one !== chosen && one !== beside;
    runs = [beside, chosen].map((panel) => ({
      facts: panel.querySelector(".facts"),
      bar: panel.querySelector("progress"),
      total: Number(panel.querySelector(".facts").dataset.total),
      pieces: all("[data-at]", panel).map((node) => ({ node, at: Number(node.dataset.at) })),
      text: panel.querySelector(".text").textContent,
    }));
    const same = runs[0].text === runs[1].text ? "The texts are identical." : "The texts differ.";
    remark = "sampled" in chosen.dataset ? "Each samples its own text." : same;
    now = end = Math.max(...runs.map((run) => run.total));
    last = null;
    draw();
  }

  function draw() {
    for (const run of runs) {
      const done = now >= run.total, elapsed = `${Math.min(now, run.total).toFixed(0)} ms`;
      for (const { node, at } of run.pieces) node.classList.toggle("coming", !done && at > now);
      run.facts.textContent = done ? `${elapsed}: ${run.facts.dataset.facts}` : elapsed;
      run.bar.max = end;
      run.bar.value = Math.min(now, run.total);
    }
    play.textContent = last === null ? "Play" : "Pause";
    status.textContent = now < end ? "" : `One prompt, decoded once each, prefill included. ${remark}`;
  }

  function step(time) {
    if (last === null) return;
    now = Math.min(end, now + Math.max(0, time - last) * Number(pace.value));
    last = now < end ? time : null;
    draw();
    if (last !== null) requestAnimationFrame(step);
  }

  function start(from) {
    const running = last !== null;
    [now, last] = [from, performance.now()];
    draw();
    if (!running) requestAnimationFrame(step);
  }

  function show(shown) {
    [open.hidden, player.hidden, last] = [shown, !shown, null];
  }

  open.addEventListener("click", () => {
    show(true);
    choose();
    const long = (one) => end / Number(one.value) >= WATCHED;
    pace.value = ([...pace.options].find(long) ?? pace.options[pace.options.length - 1]).value;
    play.focus();
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches) start(0);
  });
  play.addEventListener("click", () => {
    if (last === null) return start(now < end ? now : 0);
    last = null;
    draw();
  });
  part("restart").addEventListener("click", () => start(0));
  part("close").addEventListener("click", () => {
    show(false);
    open.focus();
  });
  choice.addEventListener("change", choose);
  box.hidden = false;
}

all("table.sortable").forEach(sortable);
all(".tools[hidden]").forEach(filter);
all(".replay").forEach(replay);
