package demo

import (
	"fmt"
	"strings"
	"text/tabwriter"
)

// table prints rows of cells in aligned columns, under a title.
func (d *demo) table(title string, head []string, rows [][]string) {
	d.print("\n%s\n", title)
	w := tabwriter.NewWriter(d.out, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{head}, rows...) {
		_, _ = fmt.Fprintf(w, "  %s\n", strings.Join(row, "\t"))
	}
	_ = w.Flush() // as much as print, this is for the reader
}

func number[T ~int | ~int32 | ~uint32](n T) string { return fmt.Sprint(n) }
