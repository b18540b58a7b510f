/* The page of `vlmdistill serve`: measures plain and speculative decoding in turn, and compares them. */

const $ = (id) => document.getElementById(id);

/* The median of so many runs lies between the least and the most of them with a probability above 95%: 1 - 2 / 2^6. */
const FEWEST = 6;

const READ = ["image/png", "image/jpeg", "image/webp", "image/gif"];
let model = null, image = null, stop = null;
const replay = player($("player"), () => {});

function say(text, alarm = false) {
  $("status").textContent = text;
  $("status").classList.toggle("alarm", alarm);
}

async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached: is it still running?");
  });
  if (response.ok) return response;
  if (response.status === 401) {
    $("keyfield").hidden = false;
    const error = new Error($("key").value ? "The key is wrong." : "This server needs its key: enter it and press Run.");
    throw Object.assign(error, { calm: !$("key").value });
  }
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `The server responded with status ${response.status}.`);
}

async function connect() {
  $("about").textContent = "";
  [model] = (await (await call("/v1/models")).json()).data;
  const { id, drafter, drafters } = model;
  $("server").textContent = drafter ? `${id} with ${drafters.join(", ")}` : id;
  $("about").textContent = drafter ? "Speculative decoding against plain decoding, on this server."
    : "No drafter: start the server with --drafter NAME to compare.";
  for (const name of ["speculative", "pairsfield", "pairs-why", "legend"]) $(name).hidden = !drafter;
  $("runs").classList.toggle("one", !drafter);
  /* A panel for each drafter; the first is a part of the page. */
  for (const panel of all(".run").slice(2)) panel.remove();
  drafters.forEach((name, at) => {
    const panel = at ? $("speculative").cloneNode(true) : $("speculative"), heading = panel.querySelector("h2");
    if (at) {
      clear(panel);
      panel.id = `speculative-${at}`;
      heading.id = `${panel.id}-title`;
      panel.setAttribute("aria-labelledby", heading.id);
      $("runs").append(panel);
    }
    heading.textContent = `Speculative decoding, ${name}`;
  });
}

function choose(file) {
  if (file && !READ.includes(file.type)) return say(`${file.name} is not a PNG, JPEG, WebP or GIF image: convert it first.`, true);
  const reader = new FileReader(), shown = $("preview");
  const set = (url) => {
    image = url;
    shown.hidden = $("remove").hidden = !url;
    $("hint").hidden = Boolean(url);
    $("drop").classList.toggle("chosen", Boolean(url));
    if (url) shown.src = url; else { shown.removeAttribute("src"); $("file").value = ""; }
  };
  const unreadable = () => { set(null); say(`${file.name} cannot be read as an image: it is damaged, or no image.`, true); };
  say("");
  if (!file) return set(null);
  reader.onload = () => set(reader.result);
  shown.onerror = reader.onerror = unreadable;
  reader.readAsDataURL(file);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

/* One response of a drafter, or of plain decoding; `seen` gets each piece as it comes. */
async function measure(asked, drafter, seed, signal, seen) {
  const body = { ...asked, seed, speculate: Boolean(drafter), stream: true };
  if (model.drafters.length > 1 && drafter) body.drafter = drafter;
  const run = { pieces: [], facts: null, get text() { return this.pieces.map((piece) => piece.text).join(""); } };
  const response = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  for await (const event of events(response)) {
    if (event.piece) {
      run.pieces.push({ text: event.choices[0].delta.content, ...event.piece });
      seen(run.pieces.at(-1));
    }
    run.facts = event.decoding ?? run.facts;
  }
  if (!run.facts) throw new Error("The server ended the response early: its log has the reason.");
  return run;
}

function append(panel, piece) {
  const whole = document.createElement("span"), space = piece.text.match(/^\s*/)[0];
  const token = piece.drafted ? document.createElement("mark") : whole;
  whole.dataset.at = 1000 * piece.seconds;
  whole.append(space);
  token.append(piece.text.slice(space.length));
  if (token !== whole) whole.append(token);
  panel.querySelector(".text").append(whole);
  panel.querySelector(".facts").textContent = `${piece.seconds.toFixed(2)} s`;
}

function clear(panel) {
  for (const part of all(".text, .facts", panel)) part.textContent = "";
  panel.querySelector("progress").value = 0;
}

/* A whole run, ready for the player. */
function fill(panel, run) {
  const { tokens, seconds, calls, accepted, tokens_per_call, drafter } = run.facts, facts = panel.querySelector(".facts");
  clear(panel);
  for (const piece of run.pieces) append(panel, piece);
  facts.dataset.total = 1000 * seconds;
  facts.dataset.facts = `${tokens} tokens, ${Math.round(tokens / seconds)} a second` +
    (drafter ? `; ${accepted} accepted in ${calls} calls, ${tokens_per_call.toFixed(2)} tokens a call` : "");
}

/* Seconds a token of the first run over those of the second. */
function ratio(slow, fast) {
  return slow.facts.seconds / slow.facts.tokens / (fast.facts.seconds / fast.facts.tokens);
}

/* How many times as fast side `at` is as side `other`, in turns that have a run of each: the median, and in words. */
function compared(turns, at, other) {
  const speeds = turns.map((runs) => ratio(runs[other], runs[at])).sort((a, b) => a - b), half = speeds.length / 2;
  const times = (value) => `${value.toFixed(2)}×`, median = (speeds[Math.ceil(half) - 1] + speeds[Math.floor(half)]) / 2;
  const runs = speeds.length === 1 ? "one run" : `${speeds.length} runs`;
  const spread = speeds.length > 1 ? `${times(median)}, from ${times(speeds[0])} to ${times(speeds.at(-1))} in ${runs} of each` : `${times(median)} in ${runs} of each`;
  const level = speeds.length < FEWEST ? "unknown" : speeds[0] > 1 ? "faster" : speeds.at(-1) < 1 ? "slower" : "equal";
  return { median, times: times(median), spread, level };
}

/* The answer, what is said of it, and how sure it is. */
function verdict(turns, everything, sampled, names) {
  const same = sampled ? "Above temperature 0 each run samples its own text."
    : everything.every(([plain, ...drafted]) => drafted.every((run) => run.text === plain.text)) ? "The texts are identical in every run." : "THE TEXTS DIFFER, by near-ties that rounding decides, or it is not lossless: `vlmdistill eval` tells.";
  const broken = same.startsWith("THE TEXTS DIFFER");
  if (!turns.length) return ["No verdict", `One run tells nothing; ${FEWEST} of each are needed. ${same}`, broken ? "broken" : "none"];
  const sides = names.map((name, at) => ({ name, at: at + 1, ...compared(turns, at + 1, 0) })).sort((a, b) => b.median - a.median);
  const [best, second] = sides, speeds = sides.map((side) => names.length > 1 ? `${side.name} ${side.spread}` : side.spread).join("; ");
  let answer, sure = "none";
  if (best.level === "unknown") answer = `${best.times} so far: at least ${FEWEST} runs are needed to tell`;
  else if (best.level === "slower") answer = `${best.times}: slower`;
  else if (best.level === "equal") answer = "No clear difference";
  else [answer, sure] = [`${best.times} as fast`, ""];
  let said = `Speedup over plain decoding with this prompt: ${speeds}.`;
  if (second) {
    const lead = compared(turns, best.at, second.at);
    const clear = lead.level === "faster";
    if (best.level === "faster") answer = clear ? `${best.name}: ${best.times} as fast` : "The drafters do not differ clearly";
    said += ` ${best.name} over ${second.name}: ${lead.spread}.`;
  }
  if (broken) answer += ", but the texts differ";
  return [answer, `${said} ${same}`, broken ? "broken" : sure];
}

function tell([answer, said, sure]) {
  $("verdict").className = `verdict ${sure}`;
  $("verdict").querySelector(".answer").textContent = answer;
  $("verdict").querySelector(".said").textContent = said;
  $("verdict").hidden = false;
}

/* Forget the results of the prompt before, and say which prompt the next ones are of. */
function begin(asked) {
  for (const name of ["verdict", "player", "progress"]) $(name).hidden = true;
  for (const panel of all(".run")) clear(panel);
  const shown = $("asked").querySelector("img");
  shown.hidden = !image;
  if (image) shown.src = image;
  $("asked").querySelector("q").textContent = $("prompt").value;
  $("results").hidden = !asked;
}

async function compare(signal) {
  begin(false);
  await connect();
  begin(true);
  const content = image ? [{ type: "image_url", image_url: { url: image } }] : [];
  content.push({ type: "text", text: $("prompt").value });
  const temperature = $("temperature").valueAsNumber;
  const asked = { model: model.id, messages: [{ role: "user", content }], max_tokens: $("tokens").valueAsNumber, temperature };
  const sides = [null, ...model.drafters], panels = all(".run").slice(0, sides.length);
  const wanted = model.drafter ? $("pairs").valueAsNumber : 0, done = [];

  /* A run of each, in reverse in every second turn: what warms up or slows down the machine is fair to all. */
  async function turn(number) {
    const runs = [];
    for (const at of number % 2 ? [...sides.keys()].reverse() : sides.keys()) {
      const panel = panels[at], counted = number ? `, run ${number} of ${wanted}` : "";
      say(`Measuring ${sides[at] ?? "plain decoding"}${counted}`);
      if (!number) panel.querySelector("progress").removeAttribute("value");
      runs[at] = await measure(asked, sides[at], number, signal, number ? () => {} : (piece) => append(panel, piece));
      if (!number) panel.querySelector("progress").value = 1;
    }
    done.push(runs);
    $("progress").value = number;
  }

  function show() {
    const [, ...turns] = done, speed = ([plain, drafted]) => drafted ? ratio(plain, drafted) : 0;
    const middle = turns.length ? [...turns].sort((a, b) => speed(a) - speed(b))[turns.length >> 1] : done[0];
    middle.forEach((run, at) => fill(panels[at], run));
    if (model.drafter) tell(verdict(turns, done, temperature > 0, model.drafters));
    $("progress").hidden = true;
    $("player").hidden = false;
    replay.show(panels);
  }

  try {
    await turn(0);
    [$("progress").max, $("progress").hidden] = [wanted, !wanted];
    for (let number = 1; number <= wanted; number++) await turn(number);
    say("");
    show();
    replay.watch();
  } catch (error) {
    if (error.name !== "AbortError") begin(false);
    else if (done.length) show();
    else for (const bar of all(".run progress")) bar.value = 0;
    throw error;
  }
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (stop) return stop.abort();
  $("prompt").setCustomValidity($("prompt").value.trim() ? "" : "Write a prompt.");
  if (!$("form").reportValidity()) return;
  stop = new AbortController();
  $("run").textContent = "Stop";
  replay.pause();
  try { await compare(stop.signal); } catch (error) {
    if (error.name === "AbortError") say("Stopped."); else say(error.message, !error.calm);
  }
  [stop, $("run").textContent] = [null, "Run"];
});
$("prompt").addEventListener("input", () => $("prompt").setCustomValidity(""));
$("key").addEventListener("change", () => connect().then(() => say(""), (error) => say(error.message, true)));
$("file").addEventListener("change", () => $("file").files[0] && choose($("file").files[0]));
$("remove").addEventListener("click", () => choose(null));
for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, (event) => {
  event.preventDefault();
  $("drop").classList.toggle("over", kind === "dragover");
  if (kind === "drop" && event.dataTransfer.files[0]) choose(event.dataTransfer.files[0]);
});
connect().catch((error) => say(error.message, !error.calm));
