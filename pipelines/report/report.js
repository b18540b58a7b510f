/* Sorts and filters tables, and replays responses. Nothing plays until it is asked to. */

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

function replay(box) {
  const [open, panels, choice] = ["open", "player", "choice"].map((name) => box.querySelector(`.${name}`));
  const drafted = all(".drafted", box), plain = all(".plainly", box), status = box.querySelector("[role=status]");
  let remark = "";
  const playing = player(panels, (ended) => {
    status.textContent = ended ? `One prompt, decoded once each, prefill included. ${remark}` : "";
  });

  function choose() {
    const chosen = drafted[choice.selectedIndex], beside = plain[Number(chosen.dataset.plain)];
    for (const one of [...plain, ...drafted]) one.hidden = one !== chosen && one !== beside;
    const [text, other] = [beside, chosen].map((panel) => panel.querySelector(".text").textContent);
    remark = "sampled" in chosen.dataset ? "Each samples its own text."
      : text === other ? "The texts are identical." : "The texts differ.";
    playing.show([beside, chosen]);
  }

  open.addEventListener("click", () => {
    [open.hidden, panels.hidden] = [true, false];
    choose();
    panels.querySelector(".play").focus();
    playing.watch();
  });
  box.querySelector(".close").addEventListener("click", () => {
    playing.pause();
    [open.hidden, panels.hidden] = [false, true];
    open.focus();
  });
  choice.addEventListener("change", choose);
  box.hidden = false;
}

all("table.sortable").forEach(sortable);
all(".tools[hidden]").forEach(filter);
all(".replay").forEach(replay);
