"use strict";
// Filters by paper, scale and title; kept in the address, so that a view can be shared. Without scripts all is shown.
const paper = document.getElementById("paper");
const scale = document.getElementById("scale");
const find = document.getElementById("find");
const articles = [...document.querySelectorAll("article")];

function apply() {
  const word = find.value.trim().toLowerCase();
  let shown = 0;
  for (const article of articles) {
    const fits =
      (!paper.value || article.dataset.paper === paper.value) &&
      (!scale.value || article.dataset.scale.split(" ").includes(scale.value)) &&
      (!word || article.querySelector("h2").textContent.toLowerCase().includes(word));
    article.hidden = !fits;
    shown += fits;
    for (const section of article.querySelectorAll("section"))
      section.hidden = Boolean(scale.value) && section.dataset.scale !== scale.value;
    const link = document.querySelector(`nav a[href="#${article.id}"]`);
    if (link) link.parentElement.hidden = !fits;
  }
  for (const group of document.querySelectorAll("nav .paper")) group.hidden = !group.querySelector("li:not([hidden])");
  document.getElementById("count").textContent = `${shown} of ${articles.length} shown`;
  const chosen = new URLSearchParams();
  for (const field of [paper, scale, find]) if (field.value) chosen.set(field.id, field.value);
  const query = chosen.toString();
  history.replaceState(null, "", (query ? `?${query}` : location.pathname) + location.hash);
}

// Sorting by a column: as numbers where both cells begin with one.
for (const button of document.querySelectorAll("th button"))
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const column = [...head.parentElement.children].indexOf(head);
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const other of head.parentElement.children) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = head.closest("table").tBodies[0];
    const value = (row) => row.cells[column].textContent.replace("∞", "Infinity").replace("−", "-");
    const compare = (a, b) => {
      const [x, y] = [parseFloat(value(a)), parseFloat(value(b))];
      return Number.isNaN(x) || Number.isNaN(y) ? value(a).localeCompare(value(b)) : x - y;
    };
    body.append(...[...body.rows].sort((a, b) => (down ? compare(b, a) : compare(a, b))));
  });
const provenance = document.getElementById("provenance");
provenance.addEventListener("change", () => document.body.classList.toggle("provenance", provenance.checked));

const asked = new URLSearchParams(location.search);
for (const field of [paper, scale, find]) if (asked.has(field.id)) field.value = asked.get(field.id);
for (const field of [paper, scale]) field.addEventListener("change", apply);
find.addEventListener("input", apply);
document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
if (matchMedia("(max-width: 52rem)").matches) document.querySelector("nav details").open = false;
apply();
