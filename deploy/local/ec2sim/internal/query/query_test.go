package query

import (
	"net/url"
	"reflect"
	"testing"
)

type request struct {
	Paging  `query:",inline"`
	ID      id       `query:"Id"`
	Flag    bool     `query:"Flag"`
	Count   *int     `query:"Count"`
	Names   []id     `query:"Name"`
	Filters []filter `query:"Filter"`
	Nested  *struct {
		Value *bool `query:"Value"`
	} `query:"Nested"`
	Untagged string
}

type (
	id     string
	Paging struct {
		MaxResults *int `query:"MaxResults"`
	}
	filter struct {
		Name   string   `query:"Name"`
		Values []string `query:"Value"`
	}
)

func TestDecode(t *testing.T) {
	two, yes := 2, true
	tests := []struct {
		name, form string
		want       request
	}{
		{"nothing", "", request{}},
		{"scalars", "Id=a&Flag=true&Count=2", request{ID: "a", Flag: true, Count: &two}},
		{"inline", "MaxResults=2", request{Paging: Paging{MaxResults: &two}}},
		{"upper case bool", "Flag=TRUE", request{Flag: true}},
		{"list in numeric order with gaps", "Name.10=c&Name.2=b&Name.1=a", request{Names: []id{"a", "b", "c"}}},
		{"empty list", "Name=", request{}},
		{
			"filters", "Filter.1.Name=x&Filter.1.Value.1=p&Filter.1.Value.2=q&Filter.2.Name=y",
			request{Filters: []filter{{Name: "x", Values: []string{"p", "q"}}, {Name: "y"}}},
		},
		{"nested", "Nested.Value=true", request{Nested: &struct {
			Value *bool `query:"Value"`
		}{Value: &yes}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got request
			p := parse(t, tt.form)
			if err := p.Decode(&got); err != nil {
				t.Fatal(err)
			}
			if err := p.Unread(); err != nil {
				t.Error(err)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	tests := []struct {
		name, form string
		problem    Problem
		parameter  string
	}{
		{"twice", "Id=a&Id=b", Duplicate, "Id"},
		{"empty part", "Filter..Name=a", Malformed, "Filter..Name"},
		{"too deep", "a.a.a.a.a.a.a.a.a.a.a=1", Malformed, "a.a.a.a.a.a.a.a.a.a.a"},
		{"not a bool", "Flag=maybe", NotBool, "Flag"},
		{"not an int", "Count=many", NotInt, "Count"},
		{"int too large", "Count=2147483648", NotInt, "Count"},
		{"unknown", "Other=1", Unknown, "Other"},
		{"unknown below a list", "Filter.1.Other=1", Unknown, "Filter.1.Other"},
		{"untagged field", "Untagged=1", Unknown, "Untagged"},
		{"index zero", "Name.0=a", Unknown, "Name.0"},
		{"index with leading zero", "Name.01=a", Unknown, "Name.01"},
		{"index too large", "Name.100001=a", Unknown, "Name.100001"},
		{"scalar as list", "Id.1=a", Unknown, "Id.1"},
		{"list as scalar", "Name=a", Unknown, "Name"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			values, err := url.ParseQuery(tt.form)
			if err != nil {
				t.Fatal(err)
			}
			got := decodeAll(values, &request{})
			if got == nil || got.Problem != tt.problem || got.Name != tt.parameter {
				t.Errorf("got %v, want problem %d of %s", got, tt.problem, tt.parameter)
			}
		})
	}
}

func TestIgnore(t *testing.T) {
	p := parse(t, "Other.1.Deep=1&Id=a")
	p.Ignore("Other", "Absent")
	if err := p.Decode(&request{}); err != nil {
		t.Fatal(err)
	}
	if err := p.Unread(); err != nil {
		t.Error(err)
	}
}

// FuzzDecode checks that no form makes the decoder panic, and that a form is
// either wholly read or refused by name.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		"", "Id=a&Flag=1", "Filter.1.Name=x&Filter.1.Value.1=y", "Name.1=a&Name.1.2=b", "Nested=1&Nested.Value=0", "Count=-1", "....", "Name.99999999999999999999=1",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, form string) {
		values, err := url.ParseQuery(form)
		if err != nil {
			t.Skip()
		}
		var got request
		if problem := decodeAll(values, &got); problem != nil {
			if problem.Error() == "" || problem.Problem == 0 {
				t.Errorf("refused without saying why: %#v", problem)
			}
			return
		}
		if len(got.Names) > len(values) || len(got.Filters) > len(values) {
			t.Errorf("%d parameters made %d names and %d filters", len(values), len(got.Names), len(got.Filters))
		}
	})
}

func decodeAll(values url.Values, into any) *Error {
	p, err := Parse(values)
	if err != nil {
		return err
	}
	if err := p.Decode(into); err != nil {
		return err
	}
	return p.Unread()
}

func parse(t *testing.T, form string) *Params {
	t.Helper()
	values, err := url.ParseQuery(form)
	if err != nil {
		t.Fatal(err)
	}
	p, problem := Parse(values)
	if problem != nil {
		t.Fatal(problem)
	}
	return p
}
