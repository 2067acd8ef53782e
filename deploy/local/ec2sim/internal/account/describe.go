package account

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/eniplane/eniplane/deploy/local/ec2sim/internal/limits"
)

// Page asks for a part of the rows. Without MaxResults all rows come at once.
type Page struct {
	MaxResults *int   `query:"MaxResults" json:"-"`
	NextToken  string `query:"NextToken" json:"-"`
}

// pageRules are the sizes an action allows.
type pageRules struct {
	action   string
	min, max int
	fallback int // size when none is asked for; 0 means everything
}

// paginate cuts a page out of rows that are sorted by key. A token is good for
// the request that it came from only: same action, filters and ids.
func paginate[V any](s *state, rows []V, key func(V) string, page Page, rules pageRules, request any) ([]V, string, *Error) {
	size := rules.fallback
	if page.MaxResults != nil {
		size = *page.MaxResults
		if size < rules.min {
			return nil, "", invalid("Value ( %d ) for parameter maxResults is invalid. Expecting a value greater than %d.", size, rules.min)
		}
		if size > rules.max {
			return nil, "", invalid("Value ( %d ) for parameter maxResults is invalid. Expecting a value smaller than %d.", size, rules.max)
		}
	}
	print := fingerprint(request)
	start := 0
	if page.NextToken != "" {
		after, ok := s.openToken(rules.action, print, page.NextToken)
		if !ok {
			return nil, "", Errorf("InvalidNextToken", "The specified NextToken is not valid.")
		}
		start = sort.Search(len(rows), func(i int) bool { return key(rows[i]) > after })
	}
	rows = rows[start:]
	if size == 0 || len(rows) <= size {
		return rows, "", nil
	}
	return rows[:size], s.sealToken(rules.action, print, key(rows[size-1])), nil
}

type pageToken struct {
	After string `json:"a"`
	Sum   string `json:"s"`
}

func (s *state) sealToken(action, print, after string) string {
	text, err := json.Marshal(pageToken{After: after, Sum: s.tokenSum(action, print, after)})
	if err != nil {
		panic("account: token can not be marshalled: " + err.Error()) // two strings
	}
	return base64.RawURLEncoding.EncodeToString(text)
}

func (s *state) openToken(action, print, text string) (string, bool) {
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		return "", false
	}
	var t pageToken
	if json.Unmarshal(raw, &t) != nil {
		return "", false
	}
	return t.After, t.Sum == s.tokenSum(action, print, t.After)
}

func (s *state) tokenSum(action, print, after string) string {
	seed := binary.BigEndian.AppendUint64(nil, s.seed)
	digest := sha256.Sum256([]byte(string(seed) + strings.Join([]string{action, print, after}, "\x00")))
	return hex.EncodeToString(digest[:8])
}

// DescribeInstancesRequest is the input of DescribeInstances.
type DescribeInstancesRequest struct {
	DryRun      `query:",inline"`
	Page        `query:",inline"`
	Filters     []Filter     `query:"Filter"`
	InstanceIDs []InstanceID `query:"InstanceId"`
}

// DescribeInstances lists instances by id; terminated ones for an hour more.
func (a *Account) DescribeInstances(req DescribeInstancesRequest) ([]InstanceDetail, string, *Error) {
	var rows []InstanceDetail
	var next string
	err := a.read(req.DryRun.DryRun, func(s *state, now time.Time) *Error {
		if len(req.InstanceIDs) > 0 && req.MaxResults != nil {
			return combination("The parameter instancesSet cannot be used with the parameter maxResults")
		}
		found, err := selectRows(s.instances, kindInstance(), req.InstanceIDs, req.Filters, s.instanceFields,
			func(i Instance) bool { return i.visible(now) })
		if err != nil {
			return err
		}
		found, next, err = paginate(s, found, func(i Instance) string { return string(i.ID) }, req.Page, pageRules{"DescribeInstances", 5, 1000, 0}, req)
		for _, instance := range found {
			rows = append(rows, s.detail(instance))
		}
		return err
	})
	return rows, next, err
}

// DescribeNetworkInterfacesRequest is the input of DescribeNetworkInterfaces.
type DescribeNetworkInterfacesRequest struct {
	DryRun              `query:",inline"`
	Page                `query:",inline"`
	Filters             []Filter `query:"Filter"`
	NetworkInterfaceIDs []ENIID  `query:"NetworkInterfaceId"`
}

// DescribeNetworkInterfaces lists interfaces by id.
func (a *Account) DescribeNetworkInterfaces(req DescribeNetworkInterfacesRequest) ([]NetworkInterface, string, *Error) {
	var rows []NetworkInterface
	var next string
	err := a.read(req.DryRun.DryRun, func(s *state, _ time.Time) *Error {
		if len(req.NetworkInterfaceIDs) > 0 && req.MaxResults != nil {
			return combination("The parameter networkInterfaceIdSet cannot be used with the parameter maxResults")
		}
		found, err := selectRows(s.enis, kindENI(), req.NetworkInterfaceIDs, req.Filters, s.eniFields, nil)
		if err != nil {
			return err
		}
		rows, next, err = paginate(s, found, func(n NetworkInterface) string { return string(n.ID) }, req.Page, pageRules{"DescribeNetworkInterfaces", 5, 1000, 0}, req)
		return err
	})
	return rows, next, err
}

// DescribeSubnetsRequest is the input of DescribeSubnets.
type DescribeSubnetsRequest struct {
	DryRun    `query:",inline"`
	Page      `query:",inline"`
	Filters   []Filter   `query:"Filter"`
	SubnetIDs []SubnetID `query:"SubnetId"`
}

// DescribeSubnets lists subnets by id.
func (a *Account) DescribeSubnets(req DescribeSubnetsRequest) ([]Subnet, string, *Error) {
	var rows []Subnet
	var next string
	err := a.read(req.DryRun.DryRun, func(s *state, _ time.Time) *Error {
		found, err := selectRows(s.subnets, kindSubnet(), req.SubnetIDs, req.Filters, s.subnetFields, nil)
		if err != nil {
			return err
		}
		rows, next, err = paginate(s, found, func(n Subnet) string { return string(n.ID) }, req.Page, pageRules{"DescribeSubnets", 5, 1000, 0}, req)
		return err
	})
	return rows, next, err
}

// DescribeVpcsRequest is the input of DescribeVpcs.
type DescribeVpcsRequest struct {
	DryRun  `query:",inline"`
	Page    `query:",inline"`
	Filters []Filter `query:"Filter"`
	VPCIDs  []VPCID  `query:"VpcId"`
}

// DescribeVpcs lists VPCs by id.
func (a *Account) DescribeVpcs(req DescribeVpcsRequest) ([]VPC, string, *Error) {
	var rows []VPC
	var next string
	err := a.read(req.DryRun.DryRun, func(s *state, _ time.Time) *Error {
		found, err := selectRows(s.vpcs, kindVPC(), req.VPCIDs, req.Filters, s.vpcFields, nil)
		if err != nil {
			return err
		}
		rows, next, err = paginate(s, found, func(n VPC) string { return string(n.ID) }, req.Page, pageRules{"DescribeVpcs", 5, 1000, 0}, req)
		return err
	})
	return rows, next, err
}

// DescribeSecurityGroupsRequest is the input of DescribeSecurityGroups.
type DescribeSecurityGroupsRequest struct {
	DryRun   `query:",inline"`
	Page     `query:",inline"`
	Filters  []Filter  `query:"Filter"`
	GroupIDs []GroupID `query:"GroupId"`
}

// DescribeSecurityGroups lists security groups by id.
func (a *Account) DescribeSecurityGroups(req DescribeSecurityGroupsRequest) ([]SecurityGroup, string, *Error) {
	var rows []SecurityGroup
	var next string
	err := a.read(req.DryRun.DryRun, func(s *state, _ time.Time) *Error {
		found, err := selectRows(s.groups, kindGroup(), req.GroupIDs, req.Filters, s.groupFields, nil)
		if err != nil {
			return err
		}
		rows, next, err = paginate(s, found, func(n SecurityGroup) string { return string(n.ID) }, req.Page, pageRules{"DescribeSecurityGroups", 5, 1000, 0}, req)
		return err
	})
	return rows, next, err
}

// DescribeRouteTablesRequest is the input of DescribeRouteTables.
type DescribeRouteTablesRequest struct {
	DryRun        `query:",inline"`
	Page          `query:",inline"`
	Filters       []Filter       `query:"Filter"`
	RouteTableIDs []RouteTableID `query:"RouteTableId"`
}

// DescribeRouteTables lists route tables by id.
func (a *Account) DescribeRouteTables(req DescribeRouteTablesRequest) ([]RouteTableDetail, string, *Error) {
	var rows []RouteTableDetail
	var next string
	err := a.read(req.DryRun.DryRun, func(s *state, _ time.Time) *Error {
		found, err := selectRows(s.routeTables, kindRouteTable(), req.RouteTableIDs, req.Filters, s.routeTableFields, nil)
		if err != nil {
			return err
		}
		found, next, err = paginate(s, found, func(n RouteTable) string { return string(n.ID) }, req.Page, pageRules{"DescribeRouteTables", 5, 100, 0}, req)
		for _, table := range found {
			vpc, _ := s.vpcs.get(table.VPC)
			rows = append(rows, RouteTableDetail{RouteTable: table, Local: vpc})
		}
		return err
	})
	return rows, next, err
}

// RouteTableDetail is a route table with the VPC that its local routes lead to.
type RouteTableDetail struct {
	RouteTable
	Local VPC
}

// DescribeTagsRequest is the input of DescribeTags.
type DescribeTagsRequest struct {
	DryRun  `query:",inline"`
	Page    `query:",inline"`
	Filters []Filter `query:"Filter"`
}

// DescribeTags lists tags by resource id and key.
func (a *Account) DescribeTags(req DescribeTagsRequest) ([]TaggedResource, string, *Error) {
	var rows []TaggedResource
	var next string
	err := a.read(req.DryRun.DryRun, func(s *state, now time.Time) *Error {
		if err := checkFilters(req.Filters, tagRowFields); err != nil {
			return err
		}
		var found []TaggedResource
		for _, row := range s.taggedResources(now) {
			if passes(row, req.Filters, tagRowFields) {
				found = append(found, row)
			}
		}
		var err *Error
		rows, next, err = paginate(s, found, func(r TaggedResource) string { return r.ID + "\x00" + r.Tag.Key }, req.Page, pageRules{"DescribeTags", 5, 1000, 0}, req)
		return err
	})
	return rows, next, err
}

// DescribeInstanceTypesRequest is the input of DescribeInstanceTypes.
type DescribeInstanceTypesRequest struct {
	DryRun        `query:",inline"`
	Page          `query:",inline"`
	Filters       []Filter `query:"Filter"`
	InstanceTypes []string `query:"InstanceType"`
}

// DescribeInstanceTypes lists the limits of instance types by name, a hundred
// at a time unless fewer are asked for.
func (a *Account) DescribeInstanceTypes(req DescribeInstanceTypesRequest) ([]limits.Type, string, *Error) {
	var rows []limits.Type
	var next string
	err := a.read(req.DryRun.DryRun, func(s *state, _ time.Time) *Error {
		if err := checkFilters(req.Filters, typeFields); err != nil {
			return err
		}
		names, err := s.typeNames(req.InstanceTypes)
		if err != nil {
			return err
		}
		var found []limits.Type
		for _, name := range names {
			if typ, _ := s.limits.Lookup(name); passes(typ, req.Filters, typeFields) {
				found = append(found, typ)
			}
		}
		rows, next, err = paginate(s, found, func(t limits.Type) string { return t.Name }, req.Page, pageRules{"DescribeInstanceTypes", 5, 100, 100}, req)
		return err
	})
	return rows, next, err
}

func (s *state) typeNames(wanted []string) ([]string, *Error) {
	if len(wanted) == 0 {
		return s.limits.Names(), nil
	}
	if len(wanted) > 100 {
		return nil, invalid("At most 100 instance types can be given in one request")
	}
	var unknown []string
	for _, name := range wanted {
		if _, ok := s.limits.Lookup(name); !ok {
			unknown = append(unknown, name)
		}
	}
	if len(unknown) > 0 {
		return nil, Errorf("InvalidInstanceType", "The following supplied instance types do not exist: [%s]", strings.Join(unknown, ", "))
	}
	names := slices.Sorted(slices.Values(wanted))
	return slices.Compact(names), nil
}

func typeFields(typ limits.Type, name string) ([]string, bool) {
	switch name {
	case "instance-type":
		return one(typ.Name)
	case "hypervisor":
		return one(typ.Hypervisor)
	case "bare-metal":
		return flag(typ.BareMetal)
	}
	return nil, false
}

// selectRows returns the rows with the given ids, or all, that can be seen and
// pass the filters, by id. An id that nobody has is refused.
func selectRows[K ~string, V any](t *table[K, V], k kind, ids []K, filters []Filter, f fields[V], visible func(V) bool) ([]V, *Error) {
	if err := checkFilters(filters, f); err != nil {
		return nil, err
	}
	var candidates []V
	if len(ids) == 0 {
		candidates = t.all()
	}
	for _, id := range slices.Compact(slices.Sorted(slices.Values(ids))) {
		row, err := find(t, k, id)
		if err != nil {
			return nil, err
		}
		if visible != nil && !visible(row) {
			return nil, k.missing(string(id))
		}
		candidates = append(candidates, row)
	}
	rows := make([]V, 0, len(candidates))
	for _, row := range candidates {
		if (visible == nil || visible(row)) && passes(row, filters, f) {
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// FormatTime writes a time as EC2 does.
func FormatTime(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }
